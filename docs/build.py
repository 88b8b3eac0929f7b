"""Build the site into build/docs, with warnings as errors, and check links: ``python3 run docs``.

Sphinx refuses references and headings that do not exist. lychee then follows every link, picture
and fragment in the pages as they were written. Links to other sites are not followed, for a build
needs no network, but they have to be well-formed and encrypted.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from sphinx.cmd.build import build_main

SOURCE = Path(__file__).resolve().parent
OUTPUT = SOURCE.parent / "build" / "docs"
NOTEBOOKS = SOURCE.parent / "notebooks"
GENERATED = SOURCE / "reference" / "api", SOURCE / "notebooks"


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


def main() -> int:
    """Build everything anew, so that no page of an earlier build hides a broken link."""
    for folder in (OUTPUT, *GENERATED):
        shutil.rmtree(folder, ignore_errors=True)
    copy_notebooks(SOURCE / "notebooks")
    options = ["-W", "--keep-going", "-q", "-j", "auto", "-b", "html"]
    if code := build_main([*options, str(SOURCE), str(OUTPUT)]):
        return code
    if code := check_links(OUTPUT):
        return code
    sys.stdout.write(f"{OUTPUT / 'index.html'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
