"""Run the services of compose.yaml as processes of this machine: ``python run_plain.py FOLDER``.

Where no container engine is at hand, this starts the same commands in the same order, with the
server of moto in place of its image. FOLDER is the shared volume; the exit code is that of the fit.
With ``--delay`` and ``--failing`` the object store is as if it were far away and busy.
"""

import argparse
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
PORTS = {"scheduler": (8786, 8787), "objects": (9000,)}


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class Composition:
    """The services of a file for Compose, with names of hosts and folders as they are here."""

    def __init__(self, path: Path, folder: Path, rows: str, far: tuple[float, float]) -> None:
        ports = [port for ports in PORTS.values() for port in ports]
        self.ports = dict(zip(ports, free_ports(len(ports)), strict=True))
        self.folder = folder
        self.variables = {**os.environ, "ROWS": rows}
        self.services: dict[str, dict[str, Any]] = yaml.safe_load(path.read_text())["services"]
        for service in self.services.values():
            # Split before folders are put in, whose names may hold spaces.
            words = [self.here(word) for word in shlex.split(service.get("command", ""))]
            local = ["--host", "127.0.0.1"] if "--port" in words else []
            service["command"] = words + local
            own = service.get("environment", {})
            service["environment"] = {key: self.here(value) for key, value in own.items()}
            if "healthcheck" in service:
                check = service["healthcheck"]
                check["test"] = [self.here(word) for word in check["test"]]
        port, (delay, failing) = str(self.ports[9000]), far
        serve = ["-m", "moto.server", "-H", "127.0.0.1", "-p", port]
        if delay or failing:
            script = str(HERE / "far_objects.py")
            serve = [script, "--port", port, "--delay", str(delay), "--failing", str(failing)]
        self.services["objects"]["command"] = [sys.executable, *serve]
        self.processes: dict[str, list[subprocess.Popen[bytes]]] = {}

    def here(self, text: str) -> str:
        """A word of the file as it is on this machine."""
        for port, free in self.ports.items():
            text = re.sub(rf"\b(?:scheduler|objects):{port}\b", f"127.0.0.1:{free}", text)
            text = re.sub(rf"(?<!:)(?<!\d){port}(?!\d)", str(free), text)
            text = re.sub(rf"^:{port}$", f"127.0.0.1:{free}", text)
        text = text.replace("/recipes/", f"{HERE}/").replace("/data/", f"{self.folder}/")
        return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda m: self.variables.get(m[1]) or m[2], text)

    def environment(self, name: str) -> dict[str, str]:
        """Variables of a service, with the programs of this Python first."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        own = self.services[name].get("environment", {})
        return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **own}

    def wait_until_healthy(self, name: str) -> None:
        """Repeat the check of a service until it succeeds."""
        check = self.services[name]["healthcheck"]
        for _ in range(int(check["retries"]) * 10):
            if any(process.poll() is not None for process in self.processes[name]):
                sys.exit(f"run_plain.py: {name} ended: see {self.folder / name}.log")
            done = subprocess.run(
                check["test"][1:], env=self.environment(name), stderr=subprocess.DEVNULL
            )
            if done.returncode == 0:
                return
            time.sleep(0.2)
        sys.exit(f"run_plain.py: {name} is not healthy: see {self.folder / name}.log")

    def start(self, name: str) -> None:
        """Start a service, after those that it depends on, once."""
        if name in self.processes:
            return
        service = self.services[name]
        for other, needed in service.get("depends_on", {}).items():
            self.start(other)
            if needed["condition"] == "service_healthy":
                self.wait_until_healthy(other)
            elif any(process.wait() for process in self.processes[other]):
                sys.exit(f"run_plain.py: {other} failed: see {self.folder / other}.log")
        self.processes[name] = []
        with open(self.folder / f"{name}.log", "ab") as log:
            for _ in range(service.get("deploy", {}).get("replicas", 1)):
                process = subprocess.Popen(
                    service["command"],
                    env=self.environment(name),
                    cwd=self.folder,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
                self.processes[name].append(process)

    def stop(self) -> None:
        """End what runs, the latest first."""
        for group in reversed(self.processes.values()):
            for process in group:
                process.terminate()
            for process in group:
                try:
                    process.wait(timeout=10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def main() -> int:
    """Start all services and wait for the fit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="shared volume, and logs")
    parser.add_argument("--rows", default="1e6", help="rows of the sample (1e6)")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds of a request to objects")
    parser.add_argument("--failing", type=float, default=0.0, help="share of them that fails")
    given = parser.parse_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    far = given.delay, given.failing
    composition = Composition(HERE / "compose.yaml", folder, given.rows, far)
    try:
        for name in composition.services:
            composition.start(name)
        (fit,) = composition.processes["fit"]
        code = fit.wait()
    finally:
        composition.stop()
    print((folder / "fit.log").read_text())
    return code


if __name__ == "__main__":
    sys.exit(main())
