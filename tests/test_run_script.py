"""The bootstrap script `run`: its parts, and real environments made by it on crippled Pythons."""

import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import time
import types
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NO_NETWORK = (
    "ConnectionError",
    "No matching distribution",
    "Temporary failure",
    "no package index",
)


def load(script):
    spec = importlib.util.spec_from_loader(
        "run_script", SourceFileLoader("run_script", str(script))
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return load(ROOT / "run")


@pytest.fixture
def small_root(monkeypatch, tmp_path):
    """Return a project that is only `run` with a made-up .venv of which `run` thinks well."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    shutil.copy(ROOT / "run", tmp_path / "run")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    script = load(tmp_path / "run")
    script.STAMP.write_text(script.stamp())
    return script


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


# --- usage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "code"), [([], 2), (["exec"], 2), (["exec", "--"], 2), (["--help"], 0), (["nope"], 2)]
)
def test_usage(args, code):
    done = subprocess.run([sys.executable, ROOT / "run", *args], capture_output=True, text=True)
    assert done.returncode == code
    text = done.stdout + done.stderr
    assert "python3 run COMMAND" in text
    if args != ["nope"]:
        commands = ("demo", "test", "bench", "study", "slow", "docs", "notebooks", "package")
        commands += ("lint", "exec --")
        assert all(word in text for word in commands)


def test_too_old_python_is_one_sentence(run, monkeypatch, capsys):
    monkeypatch.setattr(run, "MINIMUM", (3, 99))
    assert run.main(["lint"]) == 3
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "Python 3.99 or newer is needed" in error


def test_too_old_python_hands_over_to_one_that_really_runs(run, monkeypatch, tmp_path):
    for name, text in [("python3.11", "exit 127"), ("python3.12", f'exec "{sys.executable}" "$@"')]:
        write(tmp_path / name, f"#!/bin/sh\n{text}\n").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    old = types.SimpleNamespace(version_info=(3, 9, 1), argv=["run", "test", "-k", "x"])
    monkeypatch.setattr(run, "sys", old)
    calls = []
    # The real execv does not return.
    monkeypatch.setattr(run.os, "execv", lambda path, argv: calls.append(argv) or sys.exit(0))
    with pytest.raises(SystemExit):
        run.use_new_enough_python()
    assert calls == [[str(tmp_path / "python3.12"), str(ROOT / "run"), "test", "-k", "x"]]


# --- the stamp and the environment ----------------------------------------------------------------


def test_stamp_follows_what_the_environment_depends_on(small_root, monkeypatch, tmp_path):
    stamps = [small_root.stamp()]
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'other'\n")
    stamps.append(small_root.stamp())
    with (tmp_path / "run").open("a") as script:
        script.write("# changed\n")
    stamps.append(small_root.stamp())
    monkeypatch.setattr(small_root.sys, "version", "3.99")
    stamps.append(small_root.stamp())
    (tmp_path / "moved").mkdir()
    shutil.copy(tmp_path / "pyproject.toml", tmp_path / "moved")
    monkeypatch.setattr(small_root, "ROOT", tmp_path / "moved")
    stamps.append(small_root.stamp())
    assert len(set(stamps)) == 5


def test_current_environment_is_left_alone_and_others_rebuilt(small_root, monkeypatch):
    builds = []
    monkeypatch.setattr(small_root, "build", lambda: builds.append(1))
    small_root.ensure_environment()
    assert builds == []
    small_root.STAMP.write_text("other")
    small_root.ensure_environment()
    small_root.ensure_environment()
    assert builds == [1]
    small_root.PYTHON.unlink()
    small_root.PYTHON.symlink_to("/nonexistent/python")  # the Python below it was removed
    small_root.ensure_environment()
    assert builds == [1, 1]


def test_failed_build_leaves_no_stamp(small_root, monkeypatch, capsys):
    def build():
        small_root.STAMP.unlink()
        small_root.must([sys.executable, "-c", "raise SystemExit(7)"])

    small_root.STAMP.write_text("other")
    monkeypatch.setattr(small_root, "build", build)
    assert small_root.main(["lint"]) == 3
    assert "failed with exit code 7" in capsys.readouterr().err
    assert not small_root.is_current()


def test_only_one_set_up_at_a_time(small_root, monkeypatch):
    builds = []

    def build():
        builds.append(1)
        time.sleep(0.2)

    small_root.STAMP.unlink()
    monkeypatch.setattr(small_root, "build", build)
    threads = [threading.Thread(target=small_root.ensure_environment) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert builds == [1]


def test_exec_is_clean_of_the_callers_environment(small_root, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", "/leftover")
    monkeypatch.setenv("VIRTUAL_ENV", "/leftover")
    monkeypatch.setenv("PIP_MARK", "kept")
    code = (
        "import os, sys; e = os.environ; print(e.get('PYTHONPATH'), e['VIRTUAL_ENV'], "
        "e['PATH'].split(os.pathsep)[0], e['PIP_MARK'], sys.argv[1:], os.getcwd()); sys.exit(5)"
    )
    (tmp_path / "elsewhere").mkdir()
    done = subprocess.run(
        [sys.executable, tmp_path / "run", "exec", "--", "python", "-c", code, "-h", "--", "x"],
        capture_output=True,
        text=True,
        cwd=tmp_path / "elsewhere",
    )
    venv, cwd = tmp_path / ".venv", tmp_path / "elsewhere"
    expected = f"None {venv} {venv / 'bin'} kept ['-h', '--', 'x'] {cwd}\n"
    assert (done.stdout, done.stderr, done.returncode) == (expected, "", 5)


def test_pip_installs_into_the_environment_whatever_the_caller_set(small_root, monkeypatch):
    for name in ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_PYTHON", "PIP_USER"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PIP_INDEX_URL", "https://private")
    options = {k: v for k, v in small_root.environment().items() if k.startswith("PIP_")}
    for name in ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_PYTHON"):
        assert name not in options
    assert options["PIP_INDEX_URL"] == "https://private"
    assert options["PIP_USER"] == "0"


@pytest.mark.parametrize("command", ["docs", "notebooks", "package"])
def test_scripts_of_the_project_run_in_its_environment(small_root, command):
    script = write(
        small_root.ROOT / small_root.SCRIPTS[command],
        "import sys; print(sys.executable, sys.argv[1:]); sys.exit(5)",
    )
    assert (ROOT / script.relative_to(small_root.ROOT)).is_file()
    words = [sys.executable, small_root.ROOT / "run", command, "--extra", "plot"]
    done = subprocess.run(words, capture_output=True, text=True)
    expected = f"{small_root.PYTHON} ['--extra', 'plot']\n"
    assert (done.stdout, done.stderr, done.returncode) == (expected, "", 5)


def test_the_demonstration_suggests_commands_that_its_caller_can_run(small_root, tmp_path):
    write(tmp_path / "cme_dask.py", "import os; print(os.environ['CME_DASK_COMMAND'])")
    done = subprocess.run(
        [sys.executable, "./run", "demo"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout == "python3 ./run exec -- cme-dask\n", done.stderr


def test_exec_of_a_missing_command(small_root, capsys):
    assert small_root.main(["exec", "there-is-no-such-command"]) == 127
    assert "there-is-no-such-command: No such file" in capsys.readouterr().err


def test_steps_run_at_once(small_root, capfd):
    """Each waits for a file of the other one."""
    for own, other in ("ab", "ba"):
        (small_root.ROOT / f"step_{own}.py").write_text(
            "import pathlib, time\n"
            f"pathlib.Path('{own}').touch()\n"
            "until = time.monotonic() + 600\n"
            f"while not pathlib.Path('{other}').exists():\n"
            "    assert time.monotonic() < until\n"
            "    time.sleep(0.01)\n"
            f"print('{own} is done')\n"
        )
    assert small_root.run_all([["step_a"], ["step_b"]]) == 0
    captured = capfd.readouterr()
    assert captured.out == "b is done\n"
    assert sorted(captured.err.splitlines()) == ["a is done", "run: step_a", "run: step_b"]


def test_the_end_of_the_script_is_that_of_its_steps(small_root):
    write(
        small_root.ROOT / "pytest.py",
        "import os, pathlib, time\n"
        "pathlib.Path('aside').write_text(str(os.getpid()))\n"
        "os.rename('aside', 'started')\n"
        "time.sleep(60)\n",
    )
    script = subprocess.Popen([sys.executable, small_root.ROOT / "run", "test", "-x"])
    started = small_root.ROOT / "started"
    while not started.exists():
        assert script.poll() is None
        time.sleep(0.01)
    script.terminate()
    assert script.wait() == 143
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


def test_later_steps_run_after_a_failed_one(small_root, capfd):
    assert small_root.run_all([["no_such_module"], ["json.tool", "--help"]]) == 1
    captured = capfd.readouterr()
    assert "usage" in captured.out
    assert "run: no_such_module failed\n" in captured.err
    assert "No module named no_such_module" in captured.err
    assert captured.err.endswith("failed: no_such_module\n")
    assert small_root.run_all([["json.tool", "--help"]]) == 0


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (
            ["test"],
            [
                "ruff check . run",
                "ruff format --check . run",
                "mypy",
                "pytest -n 4 --dist worksteal",
            ],
        ),
        (["test", "-k", "x"], ["pytest -k x"]),
        (["slow", "-x"], ["pytest -m slow -x"]),
        (["lint"], ["ruff check . run", "ruff format --check . run", "mypy"]),
    ],
)
def test_commands(small_root, monkeypatch, argv, expected):
    steps = []
    monkeypatch.setattr(small_root, "run_all", lambda modules: steps.extend(modules) or 0)
    assert small_root.main(argv) == 0
    assert [" ".join(step) for step in steps] == expected


@pytest.mark.parametrize(
    ("argv", "package"), [(["demo"], "cme_dask"), (["bench", "-h"], "benchmarks")]
)
def test_commands_of_packages(small_root, monkeypatch, argv, package):
    monkeypatch.setattr(small_root, "become", lambda command, **_: command)
    assert small_root.main(argv) == [small_root.PYTHON, "-m", package, *argv]


# --- real environments ----------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path):
    """Copy what an installation needs, so that this project's own .venv is not in play."""
    project = tmp_path / "project"
    project.mkdir()
    for name in ("run", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, project / name)
    shutil.copytree(
        ROOT / "cme_dask", project / "cme_dask", ignore=shutil.ignore_patterns("__pycache__")
    )
    yield project
    shutil.rmtree(tmp_path)  # pytest keeps its folders, and these are large


def set_up_and_import(project, python, path):
    """Let `run` make the environment in full; return what it said."""
    where = "import cme_dask; print(cme_dask.__file__)"
    command = [python, project / "run", "exec", "--", "python", "-c", where]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PATH": path}, cwd=project
    )
    if done.returncode == 3 and any(sign in done.stderr for sign in NO_NETWORK):
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(project / "cme_dask" / "__init__.py")
    direct = subprocess.run([project / ".venv/bin/python", "-c", "import cme_dask"], cwd="/")
    assert direct.returncode == 0
    return done.stderr


@pytest.mark.slow
def test_real_environment(tmp_path, project):
    (tmp_path / "bin").mkdir()  # without uv
    said = set_up_and_import(project, sys.executable, str(tmp_path / "bin"))
    # pip may add warnings about the index.
    assert said.startswith("run: setting up .venv with pip (up to a few minutes) ...\n")
    # Now that it is made, a second start installs nothing.
    start = time.perf_counter()
    command = [sys.executable, project / "run", "exec", "--", "python", "-c", ""]
    again = subprocess.run(command, capture_output=True)
    assert (again.returncode, again.stderr) == (0, b"")
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize("missing", ["ensurepip", "venv"])
def test_a_python_without_venv_is_one_sentence(run, monkeypatch, capsys, tmp_path, missing):
    code = f"import sys; sys.exit('No module named {missing}')"
    python = write(tmp_path / "python", f'#!/bin/sh\nexec "{sys.executable}" -c "{code}"\n')
    python.chmod(0o755)
    monkeypatch.setattr(run, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(run.sys, "_base_executable", str(python))
    monkeypatch.setattr(run.shutil, "which", lambda _: None)
    monkeypatch.setattr(run, "ensure_environment", run.build)
    assert run.main(["lint"]) == 3
    assert "install the package python3-venv" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("link", [False, True])
def test_an_environment_that_cannot_be_made_is_explained_by_venv(
    run, monkeypatch, capsys, tmp_path, link
):
    path = tmp_path / ".venv"
    path.symlink_to("missing") if link else path.touch()
    monkeypatch.setattr(run, "VENV", path)
    monkeypatch.setattr(run.shutil, "which", lambda _: None)
    monkeypatch.setattr(run, "ensure_environment", run.build)
    assert run.main(["lint"]) == 3
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"cannot make {path}: " in last
    assert ("File exists" if link else "Not a directory") in last
    assert "python3-venv" not in last


@pytest.mark.parametrize(
    ("settings", "refused", "expected"),
    [
        ("global.extra-index-url='https://a'\n:env:.cert='c'\n", (), ["pip uv", "uv ."]),
        ("", ("uv .",), ["pip uv", "uv .", "pip ."]),  # such as one that no proxy lets through
        ("", ("pip uv",), ["pip uv", "pip ."]),
        ("user.index-url='https://private'\n", (), ["pip ."]),
        (":env:.no-index='1'\n", (), ["pip ."]),
    ],
)
def test_packages_come_by_uv_unless_pip_knows_better(
    run, monkeypatch, tmp_path, settings, refused, expected
):
    """Pip fetches uv for that; it installs them itself where it has an index, or where uv fails."""
    made = []

    def call(command, **_):
        words = [str(word) for word in command]
        assert "install" in words
        tool = "pip" if words[1:3] == ["-m", "pip"] else Path(words[0]).name
        made.append(f"{tool} {'.' if '.[dev]' in words else words[-1]}")
        return int(made[-1] in refused)

    listed = types.SimpleNamespace(returncode=0, stdout=settings.encode())
    monkeypatch.setattr(run, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(run.shutil, "which", lambda _: None)
    monkeypatch.setattr(run.subprocess, "call", call)
    # Of venv, and of pip about its configuration.
    monkeypatch.setattr(run.subprocess, "run", lambda command, **_: listed)
    run.build()
    assert made == expected


@pytest.mark.slow
def test_real_environment_with_uv(tmp_path, project):
    if not (uv := shutil.which("uv")):
        pytest.skip("uv is not on PATH")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "uv").symlink_to(uv)
    said = set_up_and_import(project, sys.executable, str(tmp_path / "bin"))
    assert said.startswith("run: setting up .venv with uv ...\n")
