"""Notebooks: committed outputs can be shown, and they run; slowly, at their own sizes."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

pytest.importorskip("nbclient", reason="nbclient is not installed")
import nbformat

from notebooks import execute

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = execute.paths()
TINY = {"07-operators": "1_000"}
"""Sizes at which a test of seconds runs."""

MACHINE = re.compile(r"(?<![\w.])/(?:tmp|home|root|work|Users|var|opt|usr)/")
MOST_BYTES = 500_000


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def check(notebook):
    """Outputs of all pictures, no errors, no warnings, nothing of one machine."""
    shown = [output for cell in code(notebook) for output in cell.outputs]
    assert [o for o in shown if o.output_type == "error" or o.get("name") == "stderr"] == []
    pictures = [o for o in shown if "image/png" in o.get("data", {})]
    drawn = [cell for cell in code(notebook) if ".plot" in cell.source or "plt.show" in cell.source]
    assert len(pictures) >= len(drawn) > 0
    texts = [json.dumps([o.get("text"), o.get("data", {}).get("text/plain")]) for o in shown]
    assert not any(MACHINE.search(text) for text in texts)
    assert all("\\r" not in text for text in texts)


def test_there_are_nine():
    assert [path.stem[:2] for path in NOTEBOOKS] == [f"{n:02}" for n in range(1, 10)]
    listed = re.findall(r"\]\(\.\./notebooks/(\S+)\)", (ROOT / "docs" / "notebooks.md").read_text())
    assert listed == [path.name for path in NOTEBOOKS]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert path.stat().st_size < MOST_BYTES
    assert notebook.metadata.kernelspec == execute.KERNEL
    counts = [cell.execution_count for cell in code(notebook)]
    assert counts == list(range(1, len(counts) + 1))  # at once, from the first cell to the last
    assert not MACHINE.search("".join(cell.source for cell in notebook.cells))
    execute.parameters(notebook)
    check(notebook)


def test_links_of_notebooks_lead_somewhere():
    for path in NOTEBOOKS:
        text = "".join(cell.source for cell in nbformat.read(path, as_version=4).cells)
        for target in re.findall(r"\]\(([^)#]+)", text):
            assert (path.parent / target).is_file(), f"{path.name}: {target}"


@pytest.mark.parametrize(("name", "size"), TINY.items())
def test_notebooks_run_at_a_tiny_size(name, size):
    (path,) = execute.paths([name])
    notebook = execute.execute(path, size)
    assert code(notebook)[0].source.split("#")[0].strip().endswith(f"= {size}")
    check(notebook)


def sources(name):
    (path,) = execute.paths([name])
    return [cell.source for cell in code(nbformat.read(path, as_version=4))]


def test_rows_that_are_no_power_of_ten_have_a_largest_table(capsys):
    settings = "given kernels", "learned kernels"
    table = pd.DataFrame(
        [(n, s, 2.0) for n in (10_000, 100_000) for s in settings],
        columns=["rows", "setting", "seconds"],
    )
    exec(sources("02-rows")[-1], {"ROWS": 300_000, "table": table, "settings": settings})
    assert "0.05 million rows a second with given kernels" in capsys.readouterr().out


@pytest.mark.parametrize("rows", [8_000, 10_003])
def test_tables_of_workers_are_there_for_any_number_of_rows(rows):
    (tables,) = (source for source in sources("03-workers") if "tables = " in source)
    names = {"ROWS": rows, "folder": Path(), "sys": sys}
    names["subprocess"] = SimpleNamespace(run=lambda *args, **options: None)
    exec(tables, names)
    rows = names["ROWS"]
    for workers in (1, 2, 4):
        fitted = {rows, rows // workers, rows // 4 * workers, rows // 4}
        assert fitted <= set(names["tables"])


def test_the_command_names_what_it_cannot_find(capsys):
    with pytest.raises(SystemExit) as ended:
        execute.main(["no-such-notebook"])
    assert ended.value.code == 2
    assert "choose among 01-air-quality, 02-rows" in capsys.readouterr().err


def small(folder, *sources):
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    cells[0].metadata.tags = ["parameters"]
    path = folder / "small.ipynb"
    nbformat.write(
        nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": execute.KERNEL}), path
    )
    return path


def test_a_notebook_that_fails_stays_as_it_is(tmp_path, monkeypatch, capsys):
    path = small(tmp_path, "ROWS = 3  # few", "print(ROWS)", "assert ROWS > 5")
    before = path.read_bytes()
    monkeypatch.setattr(execute, "HERE", tmp_path)
    assert execute.main([]) == 1
    assert path.read_bytes() == before
    assert "small.ipynb failed" in capsys.readouterr().err
    assert execute.main(["--size", "7", "--out", str(tmp_path / "out")]) == 0
    assert path.read_bytes() == before
    done = nbformat.read(tmp_path / "out" / "small.ipynb", as_version=4)
    assert done.cells[0].source == "ROWS = 7  # few"
    assert done.cells[1].outputs[0].text == "7\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "small.ipynb"]


@pytest.mark.parametrize("source", ["print(3)", "ROWS = 3\nROWS = 4", "x, y = 3, 4"])
def test_a_size_is_one_variable(tmp_path, source):
    with pytest.raises(ValueError, match="one assignment"):
        execute.execute(small(tmp_path, source))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run_as_they_stand(path, tmp_path):
    command = [sys.executable, execute.__file__, path.stem, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    check(nbformat.read(tmp_path / path.name, as_version=4))
