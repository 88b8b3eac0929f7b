"""What a bench or a study leaves in a folder: its JSON form and its picture."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cme_dask.models import drawing
from cme_dask.report.progress import ProgressLines
from cme_dask.storage.atomic import disk_errors, writing

Result = dict[str, Any]


def write_result(
    result: Result,
    out: Path,
    names: tuple[str, str],
    draw: Callable[[Result, Path], None],
    progress: ProgressLines,
    pages: Mapping[str, Callable[[Result], str]] | None = None,
) -> None:
    """Write the files, and their paths into the result.

    Parameters
    ----------
    result
        The JSON form.
    out
        The folder.
    names
        Of the JSON file and of the picture.
    draw
        Draws the picture, where matplotlib is installed.
    progress
        Where it is said if it is not.
    pages
        Further texts by their file names, made from the result.
    """
    json_file, picture = (out / name for name in names)
    result["files"] = [str(json_file)]
    if drawing.available():
        with writing(picture, overwrite=True) as aside, disk_errors(picture):
            draw(result, aside)
        result["files"].append(str(picture))
    else:
        progress.say(f"no picture: {drawing.MISSING}")
    for name, text in (pages or {}).items():
        with writing(out / name, overwrite=True) as aside, disk_errors(out / name):
            aside.write_text(text(result))
        result["files"].append(str(out / name))
    with writing(json_file, overwrite=True) as aside, disk_errors(json_file):
        aside.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
