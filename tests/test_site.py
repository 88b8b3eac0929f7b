"""The documentation site: every page and every public name has its place; slowly, it is built."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import test_public_api as public

import cme_dask

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


def directives(path, name):
    """Entries of each directive of this name in a page, with the module that was current."""
    module = ""
    for block in re.split(r"\n(?=\S)", path.read_text()):
        if found := re.match(r"\.\. (?:current)?module:: (\S+)", block):
            module = found[1]
        if block.startswith(f".. {name}::"):
            for line in block.splitlines()[1:]:
                if line.strip() and not line.strip().startswith(":"):
                    yield module, line.strip()


def children(path):
    """Pages in the tables of contents of a page."""
    for _, entry in directives(path, "toctree"):
        if entry == "notebooks/*":  # which the build copies there
            continue
        place = path.parent / entry
        (page,) = [
            p for p in (place.with_name(f"{place.name}{s}") for s in (".rst", ".md")) if p.is_file()
        ]
        yield page


def test_every_page_stands_in_one_table_of_contents():
    reached, left = [], [DOCS / "index.rst"]
    while left:
        page = left.pop()
        reached.append(page)
        if page.suffix == ".rst":
            left += children(page)
    pages = [p for s in ("rst", "md") for p in DOCS.rglob(f"*.{s}")]
    built = {"_templates", "api", "notebooks"}
    parts = [p for p in pages if not built & set(p.relative_to(DOCS).parts)]
    assert sorted(reached) == sorted(parts)


def referenced():
    """Dotted names of all entries of the reference."""
    for page in sorted((DOCS / "reference").glob("*.rst")):
        for module, entry in directives(page, "autosummary"):
            yield ".".join(filter(None, [module, entry.removeprefix("~")]))


def public_names():
    """Public names as users import them, then classes that these return, by their modules."""
    values = {}
    for module in (cme_dask, *(getattr(cme_dask, name) for name in cme_dask._MODULES)):
        for name in public.named(module):
            if name not in cme_dask._MODULES:
                values[f"{module.__name__}.{name}"] = getattr(module, name)
    known = {id(value) for value in values.values()}
    others = [kind for kind in public.returned(values.values()) if id(kind) not in known]
    shown = [kind for kind in others if not kind.__name__.startswith("_")]
    return values.keys() | {f"{kind.__module__}.{kind.__name__}" for kind in shown}


def test_every_public_name_is_in_the_reference_once():
    entries = list(referenced())
    assert len(set(entries)) == len(entries)
    assert public_names() - set(entries) == set()


def test_every_entry_of_the_reference_is_there():
    import pkgutil

    for entry in referenced():
        pkgutil.resolve_name(entry)


def test_modules_have_pages_of_their_own():
    for name in cme_dask._MODULES:
        text = (DOCS / "reference" / f"{name}.rst").read_text()
        assert f".. module:: cme_dask.{name}\n" in text


def test_every_picture_is_in_the_gallery_and_leads_to_its_page():
    found = re.findall(
        r"\[!\[[^\]]+\]\((\S+\.png)\)\]\((\w[\w-]*\.md)", (DOCS / "gallery.md").read_text()
    )
    assert sorted(png for png, _ in found) == sorted(path.name for path in DOCS.glob("*.png"))
    for png, page in found:
        assert png == "demo.png" or f"({png})" in (DOCS / page).read_text(), png


ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`(?:[^`<]*<)?[~.]?([\w.]+)>?`")


def roles_of(tree, owners=()):
    """References in docstrings of a module, each with the classes around it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield from ((owners, name) for name in ROLE.findall(str(node.value.value)))
        inner = (*owners, node.name) if isinstance(node, ast.ClassDef) else owners
        yield from roles_of(node, inner)


def leads_to(scope, names):
    for name in names:
        if name in getattr(scope, "__annotations__", {}):  # a field without a default
            return True
        if not hasattr(scope, name):
            return False
        scope = getattr(scope, name)
    return True


def test_references_in_docstrings_are_there():
    """Seen from the classes around them, from their module, or from any module of the package."""
    root = Path(cme_dask.__file__).parents[1]
    each = {}
    for path in sorted((root / "cme_dask").rglob("*.py")):
        name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        if not name.endswith("__main__"):
            each[importlib.import_module(name)] = path
    missing = []
    for module, path in each.items():
        for owners, target in roles_of(ast.parse(path.read_text())):
            around = [module]
            for owner in owners:
                around.append(getattr(around[-1], owner))
            whole = target.startswith("cme_dask.")
            names = target.split(".")[1:] if whole else target.split(".")
            scopes = [cme_dask] if whole else [*around[::-1], *each]
            if not any(leads_to(scope, names) for scope in scopes):
                missing.append((module.__name__, target))
    assert missing == []


# The build --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_reference_in_pages_and_docstrings_is_there():
    """As the whole build asks it, which takes longer."""
    pytest.importorskip("sphinx", reason="Sphinx is not installed")
    command = [sys.executable, DOCS / "build.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def site():
    """Built as by ``python3 run docs``: warnings and broken links end it."""
    pytest.importorskip("sphinx", reason="Sphinx is not installed")
    command = [sys.executable, DOCS / "build.py"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return Path(done.stdout.splitlines()[-1]).parent


BROKEN = """() => [...document.querySelectorAll('main img')].filter(
  image => image.complete && image.naturalWidth === 0).length"""


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_a_browser_shows_all_pages_without_a_network(site, browser, width, scheme):
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True
    )
    page = context.new_page()
    lost = []
    page.on("requestfailed", lambda request: lost.append(request.url))
    page.on("pageerror", lambda error: lost.append(str(error)))
    for path in sorted(site.rglob("*.html")):
        if "_static" in path.parts:
            continue
        page.goto(path.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path
        assert page.evaluate(BROKEN) == 0, path
        assert page.evaluate("document.documentElement.dataset.theme") == scheme, path
    assert lost == []
    context.close()


@pytest.mark.slow
def test_search_works_without_a_network(site, browser):
    context = browser.new_context(offline=True)
    page = context.new_page()
    page.goto((site / "search.html").as_uri() + "?q=conformal")
    page.wait_for_selector("ul.search li a")
    targets = page.locator("ul.search li a").evaluate_all("all => all.map(a => a.href)")
    assert any("laws.html" in target for target in targets)
    context.close()
