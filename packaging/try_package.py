"""Build sdist and wheel into dist, install them with each extra, and try them.

``python3 run package`` takes a quarter of an hour or more, most of it for downloads; ``--extra
plot`` tries one extra. The wheel is built from the sdist, so that the sdist is complete. Each
environment is new and holds the wheel with one extra alone; ``tries.py`` says what is tried in it.
"""

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
NONE = "base"
"""The try of an environment without any extra."""


def run(*words, **options):
    """Run a command, and fail with it."""
    subprocess.run([str(word) for word in words], check=True, **options)


def build(folder: Path) -> tuple[Path, Path]:
    """Build into dist: the wheel, and the files of the sdist, unpacked into a folder."""
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    hatch = [sys.executable, "-m", "hatchling", "build", "-d", dist]
    run(*hatch, "-t", "sdist", cwd=ROOT)
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    source = folder / sdist.name.removesuffix(".tar.gz")
    run(*hatch, "-t", "wheel", cwd=source)
    (wheel,) = dist.glob("*.whl")
    return wheel, source


def try_extra(extra: str, wheel: Path, source: Path, folder: Path) -> str:
    """Install the wheel with one extra into a new environment, and try it there."""
    start = time.monotonic()
    python = folder / "env" / "bin" / "python"
    run(sys.executable, "-m", "venv", folder / "env")
    wanted = str(wheel) if extra == NONE else f"{wheel}[{extra}]"
    pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    run(*pip, "install", wanted)
    run(*pip, "check")
    size = sum(path.stat().st_size for path in (folder / "env").rglob("*") if path.is_file())
    installed = time.monotonic()
    (folder / "work").mkdir()
    shutil.copytree(source, folder / "work" / "source")
    run(python, HERE / "tries.py", extra, cwd=folder / "work")
    took, tried = installed - start, time.monotonic() - installed
    return f"{extra:8} {size / 1e6:6.0f} MB, installed in {took:.0f} s, tried in {tried:.0f} s"


def main() -> int:
    """Try all extras, or those that are named, and print a line for each."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [NONE, *project["optional-dependencies"]]
    parser = argparse.ArgumentParser(description=__doc__, prog="python3 run package")
    parser.add_argument("--extra", action="append", choices=names, help="try this one; repeat it")
    extras = parser.parse_args().extra or names
    failed = []
    with tempfile.TemporaryDirectory(prefix="cme-dask-package-") as temporary:
        wheel, source = build(Path(temporary))
        for extra in extras:
            folder = Path(temporary) / f"try-{extra}"
            folder.mkdir()
            try:
                line = try_extra(extra, wheel, source, folder)
            except subprocess.CalledProcessError as error:
                line = f"{extra:8} failed: {error}"
                failed.append(extra)
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
            shutil.rmtree(folder)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
