"""Build the site into build/docs, with warnings as errors, and check links: ``python3 run docs``.

Sphinx refuses references and headings that do not exist. lychee then follows every link, picture
and fragment in the pages as they were written. Links to other sites are not followed, for a build
needs no network, but they have to be well-formed and encrypted. With ``--check`` nothing is written
here: pages and docstrings are read, and their references are checked.
"""

import argparse
import gc
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from sphinx.cmd.build import build_main

SOURCE = Path(__file__).resolve().parent
OUTPUT = SOURCE.parent / "build" / "docs"
NOTEBOOKS = SOURCE.parent / "notebooks"
GENERATED = SOURCE / "reference" / "api", SOURCE / "notebooks"
STRICT = ["-W", "--keep-going", "-q"]


def copy_notebooks(target: Path) -> None:
    """Put the notebooks where Sphinx reads, with their links to pages as from there."""
    target.mkdir()
    for path in NOTEBOOKS.glob("*.ipynb"):
        text = path.read_text(encoding="utf-8").replace("](../docs/", "](../")
        (target / path.name).write_text(text, encoding="utf-8")


def check_links(site: Path) -> int:
    """Exit code of lychee, which prints each broken link; files of the theme hold templates."""
    pages = [str(page) for page in site.rglob("*.html") if "_static" not in page.parts]
    options = ["--offline", "--include-fragments=full", "--require-https", "--no-progress"]
    program = Path(sys.executable).with_name("lychee")
    command = [program, *options, "--root-dir", site, "--files-from", "-"]
    return subprocess.run(command, input="\n".join(pages), text=True).returncode


def check_references() -> int:
    """Exit code of Sphinx on a copy of the pages, of which it writes none."""
    gc.disable()  # an eighth of the time
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, SOURCE.name)
        shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("api", "notebooks"))
        copy_notebooks(copy / "notebooks")
        for page in SOURCE.parent.glob("*.md"):  # some are included
            shutil.copy(page, folder)
        return build_main([*STRICT, "-b", "dummy", str(copy), str(Path(folder, "site"))])


def main() -> int:
    """Build everything anew, so that no page of an earlier build hides a broken link."""
    for folder in (OUTPUT, *GENERATED):
        shutil.rmtree(folder, ignore_errors=True)
    copy_notebooks(SOURCE / "notebooks")
    if code := build_main([*STRICT, "-j", "auto", "-b", "html", str(SOURCE), str(OUTPUT)]):
        return code
    if code := check_links(OUTPUT):
        return code
    sys.stdout.write(f"{OUTPUT / 'index.html'}\n")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="check references alone")
    sys.exit(check_references() if parser.parse_args().check else main())
