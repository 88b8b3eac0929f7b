"""What describes the project to other programs: version, conda recipe, citation, extras."""

import ast
import re
import tomllib
from pathlib import Path

import pytest
import yaml

import cme_dask

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def recipe():
    return yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text())


def test_the_version_stands_in_one_place():
    assert "version" in PROJECT["dynamic"]
    before, mark = re.search(
        r"split\('(.*?)'\).*split\('(.*?)'\)", recipe()["context"]["version"]
    ).groups()
    text = (ROOT / "cme_dask" / "__init__.py").read_text()
    assert text.split(before)[1].split(mark)[0] == cme_dask.__version__
    for name in ("CITATION.cff", "conda/recipe.yaml", "docs/conf.py", "pyproject.toml"):
        assert cme_dask.__version__ not in (ROOT / name).read_text(), name


def test_the_conda_recipe_has_the_dependencies_of_the_project():
    needed = [re.sub(r"^dask\b(?!-)", "dask-core", text) for text in PROJECT["dependencies"]]
    python = f"python{PROJECT['requires-python']}"
    found = [text.replace(" ", "") for text in recipe()["requirements"]["run"]]
    assert sorted(found) == sorted([python, *needed])
    (entry,) = recipe()["build"]["python"]["entry_points"]
    assert entry == f"cme-dask = {PROJECT['scripts']['cme-dask']}"


def test_the_citation_names_this_project():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["license"] == PROJECT["license"]
    assert PROJECT["urls"]["Changelog"].startswith(citation["repository-code"])
    for reference in citation["references"]:
        for name in reference["scope"].split(", "):
            assert hasattr(cme_dask, name)


def test_every_extra_is_documented_and_tried():
    page = (ROOT / "docs" / "installation.md").read_text()
    tries = ast.parse((ROOT / "packaging" / "tries.py").read_text())
    functions = {node.name for node in tries.body if isinstance(node, ast.FunctionDef)}
    for extra in EXTRAS:
        assert f"| `{extra}` |" in page
        assert extra in functions
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == EXTRAS.keys()


def test_the_sdist_holds_what_its_tests_and_pages_need():
    builder = pytest.importorskip("hatchling.builders.sdist", reason="hatchling is not installed")
    files = builder.SdistBuilder(str(ROOT)).recurse_included_files()
    names = {file.distribution_path for file in files}
    needed = ["run", "CITATION.cff", "CONTRIBUTING.md", "docs/conf.py", "docs/project/security.md"]
    needed += ["tests/public_api.txt", "conda/recipe.yaml", "packaging/tries.py", "LICENSE"]
    needed += ["cluster/slurm/fit.sbatch", "cluster/container/Dockerfile"]
    assert set(needed) <= names
    assert not [n for n in names if n.startswith(("build/", "docs/reference/api")) or ".venv" in n]
