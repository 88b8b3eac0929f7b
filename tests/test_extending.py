"""Constraints and kernels of one's own: the examples of docs/extending.md, against oracles."""

import re
from pathlib import Path

import numpy as np
import pytest

import cme_dask
from cme_dask import JointDistribution, constraints, kernels
from cme_dask.errors import DataError

PAGE = Path(__file__).resolve().parents[1] / "docs" / "extending.md"


def example(heading):
    """The names that the first Python block under a heading of the page defines."""
    text = PAGE.read_text().partition(f"\n## {heading}\n")[2]
    return re.search(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[1]


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
