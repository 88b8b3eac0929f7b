"""Execute the notebooks beside this file and write their outputs: ``python3 run notebooks``.

The first code cell of each notebook assigns one variable, the size. With ``--size`` it gets
another value, in the file as well; ``--out`` writes to another folder and leaves the files here as
they are. A notebook is replaced only when all of its cells have run.
"""

import argparse
import os
import re
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

HERE = Path(__file__).resolve().parent
PARAMETERS = "parameters"  # the tag of the first code cell, as papermill has it
ASSIGNMENT = re.compile(r"\A(?P<name>[A-Z_]+) = (?P<value>[^#\n]+?)(?P<rest>\s*(?:#.*)?)\Z")
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def paths(names: Iterable[str] = ()) -> list[Path]:
    """The notebooks, or those whose names hold one of the given words.

    Raises
    ------
    ValueError
        If no notebook has one of the names.
    """
    everything = sorted(HERE.glob("*.ipynb"))
    chosen = []
    for name in names:
        matching = [path for path in everything if Path(name).stem in path.stem]
        if not matching:
            known = ", ".join(path.stem for path in everything)
            raise ValueError(f"no notebook is called {name}: choose among {known}")
        chosen += matching
    return sorted(set(chosen)) if chosen else everything


def parameters(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The cell that holds the size.

    Raises
    ------
    ValueError
        If there is none, or not one assignment in it.
    """
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if not code or PARAMETERS not in code[0].metadata.get("tags", ()):
        raise ValueError(f"the first code cell must have the tag {PARAMETERS}")
    if not ASSIGNMENT.match(code[0].source):
        raise ValueError("the first code cell must be one assignment, such as ROWS = 1000")
    return code[0]


def execute(path: Path, size: str | None = None, timeout: float = 600) -> nbformat.NotebookNode:
    """The notebook with its outputs, in a kernel of this Python.

    Parameters
    ----------
    path
        Its file.
    size
        Python expression for the value of its size; None for the one in the file.
    timeout
        Seconds for one cell.
    """
    notebook = nbformat.read(path, as_version=4)
    cell = parameters(notebook)
    if size is not None:
        cell.source = ASSIGNMENT.sub(rf"\g<name> = {size}\g<rest>", cell.source)
    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name=KERNEL["name"],
        extra_arguments=["--log-level=ERROR"],  # not that it listens on a port of this machine
        coalesce_streams=True,
        record_timing=False,
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute()
    return tidied(notebook)


def tidied(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Without what differs between machines: versions, and the state of widgets that are gone."""
    notebook.metadata = nbformat.from_dict(
        {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    )
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    return notebook


def main(argv: list[str] | None = None) -> int:
    """Run the command; how many notebooks failed."""
    parser = argparse.ArgumentParser(
        prog="run notebooks", description="Execute notebooks and write their outputs into them."
    )
    parser.add_argument("name", nargs="*", help="part of the name of a notebook; default all")
    parser.add_argument("--size", help="another value for the variable in their first cell")
    parser.add_argument("--out", type=Path, help="folder to write to, in place of their own")
    arguments = parser.parse_args(argv)
    try:
        chosen = paths(arguments.name)
    except ValueError as error:
        parser.error(str(error))
    out = arguments.out or HERE
    out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for path in chosen:
        begin = time.perf_counter()
        try:
            notebook = execute(path, arguments.size)
        except CellExecutionError as error:
            failed += 1
            sys.stderr.write(f"{path.name} failed\n{error}\n")
            continue
        beside = out / f".{path.name}.part"
        nbformat.write(notebook, beside)
        os.replace(beside, out / path.name)
        sys.stdout.write(f"{path.name}: {time.perf_counter() - begin:.0f} s\n")
        sys.stdout.flush()
    return failed


if __name__ == "__main__":
    sys.exit(main())
