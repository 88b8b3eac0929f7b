"""Constraints and kernels of one's own: the examples of docs/extending.md, against oracles."""

import importlib
import re
import site
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import write_store

import cme_dask
from cme_dask import JointDistribution, constraints, kernels
from cme_dask.errors import DataError
from cme_dask.kernels.text import kernel_of, read_specification
from cme_dask.reductions import FeatureBasis

PAGE = Path(__file__).resolve().parents[1] / "docs" / "extending.md"


def example(heading, number=0):
    """A Python block under a heading of the page."""
    text = PAGE.read_text().partition(f"\n## {heading}\n")[2]
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[number]


# A kernel ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[(0, "Cauchy"), (1, "Periodic")], ids=lambda one: one[1])
def kernel(request, tmp_path_factory):
    """A kernel of the page for rows of one column, and its formula written down once more."""
    number, name = request.param
    space = {"__name__": "a_users_module"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("kernel"))
        exec(example("A kernel", number), space)
    own = re.search(r"@dataclass.*?\n\n\n", example("A kernel", number), re.DOTALL)[0]
    assert len(own.splitlines()) <= 15
    if name == "Cauchy":
        return space[name](0.8), lambda t: 1 / (1 + (t / 0.8) ** 2)
    return space[name](3.0, 1.5), lambda t: np.exp(-2 * (np.sin(np.pi * t / 3) / 1.5) ** 2)


def test_a_kernel_is_evaluated_as_its_formula_says(kernel):
    kernel, of_difference = kernel
    X = np.random.default_rng(0).normal(size=(300, 1))
    Z = np.concatenate([X[:20], [[1e5]]])  # which is so far that rounding would show
    expected = np.array([[of_difference(x - z) for z in Z[:, 0]] for x in X[:, 0]])
    np.testing.assert_allclose(kernel.formula(np, X, Z), expected, 1e-12, 1e-12)
    np.testing.assert_allclose(kernel(X, Z), expected, 1e-11, 1e-11)
    logs = np.empty(expected.T.shape)
    kernel.evaluator(Z, log=True)(X, logs)
    np.testing.assert_allclose(logs, np.log(expected).T, 1e-10, 1e-11)
    composed = (2.0 * kernel[1] * kernels.Gaussian(1.0))(np.c_[X, X], np.c_[Z, Z])
    both = np.exp(-((X - Z.T) ** 2))
    np.testing.assert_allclose(composed, 2 * expected * both, 1e-11, 1e-11)


def test_a_kernel_is_fitted_saved_and_written_as_text(kernel, tmp_path):
    kernel, _ = kernel
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3000, 1))
    y = np.sin(x) + 0.3 * rng.normal(size=(3000, 1))
    options = {"kernel_y": kernels.Gaussian(0.7), "tol": 1e-3, "reg": 1e-5}
    fit = JointDistribution(kernel_x=kernel, **options).fit(x, y)
    at = np.array([[-0.5], [0.0], [0.5]])
    np.testing.assert_allclose(fit.expect("y0", at), np.sin(at[:, 0]), atol=0.1)
    fit.save(tmp_path / "m")
    again = cme_dask.load(tmp_path / "m")
    assert again.x.basis.newton.kernel == kernel
    assert np.array_equal(again.expect("y0", at), fit.expect("y0", at))
    assert kernels.from_dict(kernel.to_dict()) == kernel
    assert kernel_of(read_specification(kernel.to_dict()), ["a"]) == kernel
    if isinstance(kernel, kernels.Stationary):
        product = kernel_of(read_specification("cauchy:a=0.8 * gaussian:b=2"), ["a", "b"])
        assert product == type(kernel)((0.8,))[0] * kernels.Gaussian((2.0,))[1]
    else:
        with pytest.raises(DataError, match="is no kernel"):
            read_specification("periodic:0.8")


def test_names_of_kernels_are_their_own():
    with pytest.raises(DataError, match="Gaussian is the name of a kernel of cme_dask"):
        type("Gaussian", (kernels.Unit,), {})


# A constraint ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def low_rank(tmp_path_factory):
    space = {"__name__": "a_users_module"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("constraint"))
        exec(example("A constraint"), space)
    return space["LowRank"]


def sample(n=3000, seed=1):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 2))
    return x, np.stack([np.sin(x[:, 0]), x[:, 1]], axis=1) + 0.3 * rng.normal(size=(n, 2))


OPTIONS = {
    "kernel_x": kernels.Gaussian(1.0),
    "kernel_y": kernels.Gaussian(1.0),
    "max_rank": 20,
    "tol": 0.1,
    "reg": (1e-3, 1e-2),
    "n_folds": 3,
}


def test_a_constraint_takes_60_lines():
    code = re.search(r"@dataclass.*?\n\n\n", example("A constraint"), re.DOTALL)[0]
    assert len(code.splitlines()) < 60


def alternating(linear, quadratic, rank, seed):
    """Minimise <A, U V> + <D, (U V)^2> / 2 over factors by exact steps on one after the other."""
    rng = np.random.default_rng(seed)
    v = rng.normal(size=(rank, linear.shape[1]))
    for _ in range(300):
        u = np.stack(
            [np.linalg.solve((v * d) @ v.T, -v @ a) for a, d in zip(linear, quadratic, strict=True)]
        )
        v = np.stack(
            [
                np.linalg.solve((u.T * d) @ u, -u.T @ a)
                for a, d in zip(linear.T, quadratic.T, strict=True)
            ],
            axis=1,
        )
    return u @ v


@pytest.mark.parametrize("rank", [1, 3])
def test_a_constraint_is_solved_for_in_a_fit(low_rank, rank):
    fit = JointDistribution(**OPTIONS, constraint=low_rank(rank)).fit(*sample())
    free = JointDistribution(**OPTIONS).fit(*sample())
    assert np.linalg.matrix_rank(fit.coef_) == rank < np.linalg.matrix_rank(free.coef_)
    solution = free.solution_
    quadratic = np.outer(solution.eigenvalues_y + 1e-3, solution.eigenvalues_x + 1e-2)
    linear = -solution.coef * quadratic
    assert fit.solution_.info.converged

    def objective(coef):
        return (linear * coef).sum() + 0.5 * (quadratic * coef**2).sum()

    found = [objective(alternating(linear, quadratic, rank, seed)) for seed in range(3)]
    ours = objective(fit.solution_.coef)
    assert ours <= min(found) + 1e-12
    assert ours == pytest.approx(min(found), rel=1e-6)


def test_a_constraint_is_saved_extended_and_merged(low_rank, tmp_path):
    x, y = sample()
    options = {**OPTIONS, "constraint": low_rank(2)}
    fit = JointDistribution(**options).fit(x[:2000], y[:2000])
    fit.save(tmp_path / "m")
    again = cme_dask.load(tmp_path / "m")
    assert again.about["constraint_options"] == {"name": "low-rank", "rank": 2}
    assert constraints.parse(again.about["constraint_options"]) == low_rank(2)
    assert np.array_equal(again.density_ratio(x[:9], y[:9]), fit.density_ratio(x[:9], y[:9]))
    law = again.conditional(x[:4])
    assert np.isfinite(law.quantile(0.5)).all()
    fit.partial_fit(x[2000:], y[2000:])
    assert np.linalg.matrix_rank(fit.coef_) == 2
    assert fit.model_.about["rows"] == 3000


def test_names_of_constraints_are_their_own(low_rank):
    with pytest.raises(DataError, match="takes the two-sided form of the ridge"):
        JointDistribution(**OPTIONS | {"reg": 1e-3}, constraint=low_rank(1), reg_form="single").fit(
            *sample(100)
        )
    with pytest.raises(DataError, match="'certified' is the name of a constraint of cme_dask"):
        type("Mine", (constraints.Constraint,), {"name": "certified"})
    with pytest.raises(DataError, match="calibration=True needs constraint='none' or 'normalized'"):
        JointDistribution(**OPTIONS, constraint=low_rank(1), calibration=True).fit(*sample(100))


# A basis -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spline():
    """What the example of the page defines and computes."""
    space = {"__name__": "a_users_module"}
    exec(example("A basis"), space)
    return space


def test_a_fit_works_in_the_span_of_own_functions(spline, tmp_path):
    law, x, y, hats = (spline[name] for name in ("law", "x", "y", "hats"))
    assert law.basis_x_.rank == 17
    centred = hats.features(np, x) - hats.features(np, x).mean(axis=0)
    at = np.linspace(-1.9, 1.9, 7)[:, None]
    slope = np.linalg.lstsq(centred, y[:, 0] - y.mean(), rcond=None)[0]
    dense = y.mean() + (hats.features(np, at) - hats.features(np, x).mean(axis=0)) @ slope
    np.testing.assert_allclose(law.expect("y0", at), dense, atol=2e-3)  # but for the ridge
    law.save(tmp_path / "hats.model")
    again = cme_dask.load(tmp_path / "hats.model")
    assert again.x.basis.newton.kernel == hats
    np.testing.assert_array_equal(again.expect("y0", at), law.expect("y0", at))


def test_moments_in_own_functions_are_those_of_dense_products(spline):
    psi, y = spline["basis"](spline["x"]), spline["y"][:, 0]
    np.testing.assert_allclose(
        spline["moments"]["one"].blocks["x", "x"], psi.T @ psi / len(psi), rtol=1e-12
    )
    expected = np.linalg.lstsq(psi, y, rcond=None)[0]
    np.testing.assert_allclose(spline["spline"], expected, rtol=1e-10)


def test_a_basis_needs_features_that_are_finite_matrices(spline):
    class Wrong(kernels.Features):
        def features(self, xp, X):
            return X[:, 0]

    with pytest.raises(DataError, match="must derive from kernels"):
        FeatureBasis(kernels.Gaussian(1.0), 1)
    with pytest.raises(DataError, match=r"at 2 rows must have the shape \(2, m\)"):
        FeatureBasis(Wrong(), 1)

    class Logarithm(kernels.Features):
        def features(self, xp, X):
            return xp.log(X)

    basis = FeatureBasis(Logarithm(), 1)  # of rows that are all above 0
    np.testing.assert_array_equal(basis(np.array([[1.0], [np.e]])), [[0.0], [1.0]])
    with np.errstate(all="ignore"), pytest.raises(DataError, match="NaN or infinity at 2 of 3"):
        basis(np.array([[1.0], [-1.0], [0.0]]))
    with pytest.raises(DataError, match="n_columns must be an integer of at least 1"):
        FeatureBasis(spline["hats"], 0)


# On processes and clusters -----------------------------------------------------------------------


OWN = """
from dataclasses import dataclass
import numpy as np
from cme_dask import kernels
from cme_dask.constraints import Constraint, SolverInfo

@dataclass(frozen=True)
class Sech(kernels.Unit):
    length_scale: float

    def formula(self, xp, X, Z):
        squares = xp.sum((X[:, None, :] - Z[None, :, :]) ** 2, axis=-1)
        return 1.0 / xp.cosh(xp.sqrt(squares) / self.length_scale)

@dataclass(frozen=True)
class Sparse(Constraint):
    share: float = 0.5
    name = "sparse"
    reg_forms = ("two-sided",)

    def minimize(self, problem, bounds, start):
        coef = -problem.linear / problem.quadratic
        coef = np.where(abs(coef) < np.quantile(abs(coef), self.share), 0.0, coef)
        return coef, SolverInfo("threshold", "optimal", 0.0, 0.0, 0.0, 0.0, 0, 0.0, tol=1e-8)

def positive(y):
    return y[:, 0] > 0
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A kernel, a constraint and a function in a module that workers can import."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_parts.py").write_text(OWN)
    sys.path.insert(0, str(folder))
    yield importlib.import_module("own_parts")
    sys.path.remove(str(folder))


def test_own_parts_have_the_same_bits_on_processes_and_a_cluster(own, cluster, tmp_path):
    """Blocks and solutions of one's own are computed wherever the tasks run."""
    x, y = sample(20_000)
    write_store(tmp_path / "s", x, y, chunk_rows=4096)
    cluster.run(site.addsitedir, str(Path(own.__file__).parent))
    options = {**OPTIONS, "kernel_x": own.Sech(1.0), "kernel_y": own.Sech(0.8)}
    fits = [
        JointDistribution(**options, constraint=own.Sparse(0.7)).fit(
            tmp_path / "s", functions={"positive": own.positive}, **place
        )
        for place in (
            {"scheduler": "threads", "workers": 2},
            {"scheduler": "processes", "workers": 2},
            {"scheduler": cluster},
        )
    ]
    assert np.mean(fits[0].solution_.coef == 0.0) == pytest.approx(0.7, abs=0.01)
    for fit in fits[1:]:
        np.testing.assert_array_equal(fit.coef_, fits[0].coef_)
        np.testing.assert_array_equal(fit.moments_.gram, fits[0].moments_.gram)
        at = fit.expect("positive", x[:9])
        np.testing.assert_array_equal(at, fits[0].expect("positive", x[:9]))
