"""What imports what, what is public, what the wheel holds."""

import ast
import functools
import inspect
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import cme_dask
from cme_dask import JointDistribution, kernels

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "cme_dask"
BENCHMARKS = ROOT / "benchmarks"

# Who may import whom: a module may import from its own rank and lower ones. Errors and kernels
# stand below all; models need data for the model file alone.
RANK = {
    "codec": 0,
    "errors": 0,
    "config": 0,
    "display": 0,
    "kernels": 1,
    "numerics": 2,
    "constraints": 3,
    "data": 3,
    "metrics": 3,
    "learning": 4,
    "models": 4,
    "passes": 5,
    "estimators": 6,
    "reductions": 6,
    "reports": 6,
    "operators": 7,
    "cli": 8,
    "benchmarks": 9,
}
DASK_ROOMS = {"passes"}


def modules():
    return sorted(PACKAGE.rglob("*.py"))


def test_each_file_opens_with_a_sentence_that_names_its_contents():
    for path in all_modules():
        text = ast.get_docstring(parsed(path)) or ""
        sentence = text.split("\n\n")[0]
        assert sentence.endswith("."), path
        assert not sentence.startswith(("What ", "How ", "Where ")), path


@functools.cache
def parsed(path):
    """The syntax tree of a file, which several tests look at."""
    return ast.parse(path.read_text())


def all_modules():
    """Those of the package, and the benchmarks beside it."""
    return modules() + sorted(BENCHMARKS.rglob("*.py"))


def room(dotted):
    """The room of a module of the package; the package itself and ``__main__`` have none."""
    parts = dotted.split(".")
    if parts[0] == "benchmarks":
        return "benchmarks"
    if len(parts) == 1 or parts[1] in ("__main__", "__version__"):
        return None
    name = parts[1]
    return "cli" if name.startswith("cli") else name


def dotted_name(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def imports(path):
    """Every module that the file imports anywhere, and ``package.name`` for ``from`` imports."""
    found = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in {path}"
            if node.module == "cme_dask":
                found += [f"cme_dask.{alias.name}" for alias in node.names]
            else:
                found.append(node.module)
    return found


HOMES = {name: room(home) for name, home in cme_dask._HOMES.items()}


@pytest.mark.parametrize("path", all_modules(), ids=dotted_name)
def test_imports_run_one_way(path):
    here = room(dotted_name(path))
    if here is None:  # the package's own lazy doors, and `python -m`
        return
    for name in imports(path):
        if name.split(".")[0] in ("cme_dask", "benchmarks"):
            there = room(name)
            there = HOMES.get(there, there)
            assert there is None or RANK[there] <= RANK[here], f"{dotted_name(path)}: {name}"


@pytest.mark.parametrize("path", all_modules(), ids=dotted_name)
def test_only_the_rooms_of_dask_know_dask(path):
    tops = {name.split(".")[0] for name in imports(path)}
    if tops & {"dask", "distributed"}:
        assert room(dotted_name(path)) in DASK_ROOMS


# What was counted last: these may only be lowered. Files in circles of imports: those that run with
# the file, with those inside functions, and with those for type checkers alone.
CIRCLES = [((), 0), (("late",), 0), (("late", "types"), 11)]
UPWARD_ARROWS = 0


def is_for_types(node):
    """Whether this is ``if TYPE_CHECKING:``, whose imports never run."""
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def import_nodes(tree, also):
    """Imports that run with a file, and those inside functions (``late``) and of ``types``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.FunctionDef | ast.Lambda) and "late" not in also:
            continue
        elif is_for_types(node) and "types" not in also:
            yield from import_nodes(ast.Module(node.orelse, []), also)
        else:
            yield from import_nodes(node, also)


def file_arrows(also):
    """For each module of the package the modules that it imports, as dotted names."""
    names = {dotted_name(path): path for path in all_modules()}
    arrows = {}
    for name, path in names.items():
        found = set()
        for node in import_nodes(parsed(path), also):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            else:
                below = [f"{node.module}.{alias.name}" for alias in node.names]
                found |= {deep if deep in names else node.module for deep in below}
        # The package itself loads nothing but on demand.
        arrows[name] = (found & set(names)) - {name, "cme_dask"}
    return arrows


def circles(arrows):
    """Sets of modules that reach each other (strongly connected components of two or more)."""

    def reached(start):
        seen, todo = set(), [start]
        while todo:
            new = arrows[todo.pop()] - seen
            seen |= new
            todo += new
        return seen

    reach = {name: reached(name) for name in arrows}
    found = {frozenset(m for m in reach[name] if name in reach[m]) for name in arrows}
    return sorted((sorted(circle) for circle in found if len(circle) > 1), key=len)


@pytest.mark.parametrize(("also", "bar"), CIRCLES)
def test_no_more_files_import_each_other_than_before(also, bar):
    found = circles(file_arrows(also))
    assert sum(map(len, found)) <= bar, "\n".join(", ".join(circle) for circle in found)


def test_no_more_imports_run_upward_than_before():
    arrows = file_arrows(("late",))
    floors = {name: RANK.get(room(name)) for name in arrows}
    upward = [
        f"{name} -> {there}"
        for name, all_there in arrows.items()
        for there in sorted(all_there)
        if None not in (floors[name], floors[there]) and floors[name] < floors[there]
    ]
    assert len(upward) <= UPWARD_ARROWS, "\n".join(upward)


def test_circles_are_seen():
    arrows = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"e"}, "e": set()}
    assert circles(arrows) == [["b", "c"]]
    source = "import a\nif TYPE_CHECKING:\n    import b\nelse:\n    import c\ndef f():\n  import d"
    for also, expected in (((), "ac"), (("late",), "acd"), (("late", "types"), "abcd")):
        nodes = import_nodes(ast.parse(source), also)
        assert "".join(node.names[0].name for node in nodes) == expected


def test_every_room_has_a_rank():
    rooms = {room(dotted_name(path)) for path in all_modules()} - {None}
    assert rooms <= set(RANK)
    assert {"numerics", "data", "passes", "estimators"} <= rooms


@pytest.mark.parametrize("path", all_modules(), ids=dotted_name)
def test_nothing_is_pickled_or_executed(path):
    tops = {name.split(".")[0] for name in imports(path)}
    assert not tops & {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
    calls = [n.func for n in ast.walk(parsed(path)) if isinstance(n, ast.Call)]
    assert not {f.id for f in calls if isinstance(f, ast.Name)} & {"eval", "exec", "compile"}


def run(code):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_and_querying_need_neither_dask_nor_sklearn(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(200, 1)), rng.normal(size=(200, 1))
    kernel = kernels.Gaussian(1.0)
    fit = JointDistribution(kernel_x=kernel, kernel_y=kernel, tol=0.1).fit(x, y)
    fit.save(tmp_path / "m")
    code = f"""
import sys
def heavy():
    return sorted({{"dask", "distributed", "sklearn", "pandas", "xarray"}} & set(sys.modules))
import cme_dask
assert not heavy(), heavy()
model = cme_dask.load({str(tmp_path / "m")!r})
values, std = model.expect("y0", [[0.0], [1.0]], return_std=True)
model.density_ratio([[0.0]], [[1.0]])
repr(model), model._repr_html_()
assert not heavy(), heavy()
import cme_dask.estimators.joint  # estimators are scikit-learn's, but not all of it is loaded
slow = {{"dask.array", "xarray", "sklearn.cluster", "sklearn.tree"}} & set(sys.modules)
assert not slow, slow
import cme_dask.estimators.multiclass  # which learns networks with JAX
assert not {{"jax", "optax"}} & set(sys.modules)
print(*(float(v).hex() for v in values))
"""
    printed = [float.fromhex(text) for text in run(code).split()]
    assert_array_equal(printed, fit.expect("y0", [[0.0], [1.0]]))


def public():
    names = {name: getattr(cme_dask, name) for name in cme_dask.__all__}
    return {name: value for name, value in names.items() if not inspect.ismodule(value)}


def test_public_names_exist():
    assert set(cme_dask.__all__) >= {"JointDistribution", "PivotedCholesky", "load", "open_sample"}
    assert set(cme_dask._HOMES) <= set(cme_dask.__all__)
    assert set(cme_dask.__all__) <= set(dir(cme_dask))
    assert cme_dask.errors.DataError.__mro__[1] is cme_dask.errors.CmeDaskError
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = cme_dask.nonsense


def callables():
    for name, value in public().items():
        yield name, value
        if inspect.isclass(value):
            for key, member in vars(value).items():
                if not key.startswith("_") and inspect.isfunction(member):
                    yield f"{name}.{key}", member


@pytest.mark.parametrize(("name", "value"), list(callables()))
def test_public_names_have_numpydoc_docstrings(name, value):
    text = inspect.getdoc(value)
    assert text
    assert text.splitlines()[0].endswith("."), f"{name}: the first line is a sentence"
    function = value.__init__ if inspect.isclass(value) else value
    arguments = [a for a in inspect.signature(function).parameters if a != "self"]
    delegated = "see :meth:" in text  # described where it leads
    if arguments and not delegated and name != "PivotedCholesky.transform":
        section = text.partition("Parameters\n----------\n")[2]
        missing = [a for a in arguments if a not in section]
        assert name.endswith("get_feature_names_out") or not missing, f"{name}: {missing}"


def test_the_wheel_holds_the_package_only(tmp_path):
    """Built by the backend itself, without pip, so that it also runs without a network."""
    builder = pytest.importorskip("hatchling.builders.wheel", reason="hatchling is not installed")
    wheel = next(builder.WheelBuilder(str(ROOT)).build(directory=str(tmp_path)))
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"cme_dask", f"cme_dask-{cme_dask.__version__}.dist-info"}
    assert {str(p.relative_to(ROOT)) for p in modules()} <= set(names)
    assert "cme_dask/py.typed" in names
    assert not [name for name in names if name.endswith(".pyc")]


def test_the_wheel_is_declared_to_hold_the_package_only():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["cme_dask"]
    for group, name in (("scripts", "cme-dask"), ("entry-points", "dask_cli")):
        entries = project["project"][group][name]
        for target in [entries] if isinstance(entries, str) else entries.values():
            module = target.split(":")[0]
            path = ROOT.joinpath(*module.split("."))
            assert path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()
