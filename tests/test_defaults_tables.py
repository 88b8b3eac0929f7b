"""Default fits of tables whose columns are of any kind and size, alone and beside each other."""

import warnings

import numpy as np
import pandas as pd
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cme_dask import JointDistribution, errors, load

NUMBERS = {
    "normal": lambda rng, n: rng.normal(size=n),
    "heavy": lambda rng, n: rng.standard_cauchy(n),
    "skewed": lambda rng, n: np.exp(3 * rng.normal(size=n)),
    "far": lambda rng, n: 1e9 + rng.normal(size=n),
    "large": lambda rng, n: 1e100 * rng.normal(size=n),
    "small": lambda rng, n: 1e-100 * rng.normal(size=n),
    "single": lambda rng, n: rng.normal(size=n).astype(np.float32),
    "counts": lambda rng, n: rng.integers(0, 6, n),
    "rare": lambda rng, n: (np.arange(n) == n // 2).astype(float),
    "dry": lambda rng, n: np.where(rng.random(n) < 0.5, 0.0, rng.exponential(size=n)),
    "times": lambda rng, n: np.arange(n),
    "constant": lambda rng, n: np.full(n, 3.25),
}
OTHERS = {
    "truths": lambda rng, n: rng.random(n) < 0.3,
    "text": lambda rng, n: rng.choice(["a", "b", "c"], n).astype(object),
    "names": lambda rng, n: np.array([f"n{i}" for i in rng.integers(0, 30, n)], dtype=object),
    "categories": lambda rng, n: pd.Categorical(rng.choice(["u", "v"], n)),
}
KINDS = NUMBERS | OTHERS
OURS = [
    errors.ConstantColumnWarning,
    errors.ConvergenceWarning,
    errors.LengthScaleWarning,
    errors.RankWarning,
    errors.ToleranceWarning,
]


def columns(letter, kinds, n, seed):
    rng = np.random.default_rng(seed)
    return pd.DataFrame({f"{letter}{i}": KINDS[kind](rng, n) for i, kind in enumerate(kinds)})


@settings(max_examples=15, derandomize=True)
@given(
    of_x=st.lists(st.sampled_from([*KINDS]), min_size=1, max_size=4),
    of_y=st.lists(st.sampled_from([*NUMBERS]), min_size=1, max_size=2),
    n=st.sampled_from([3, 8, 20, 60]),
    seed=st.integers(0, 9),
)
@example(of_x=["far"], of_y=["normal"], n=60, seed=0)
@example(of_x=["large", "small", "names"], of_y=["heavy", "dry"], n=60, seed=0)
def test_any_table_has_laws(of_x, of_y, n, seed, tmp_path_factory):
    X, Y = columns("x", of_x, n, seed), columns("y", of_y, n, seed + 10)
    with warnings.catch_warnings():
        for category in OURS:  # and nothing warns of overflows or values that are not finite
            warnings.simplefilter("ignore", category)
        fit = JointDistribution().fit(X, Y)
        path = tmp_path_factory.mktemp("models") / "model"
        fit.save(path)
        law, again = (each.conditional(X[:9]) for each in (fit, load(path)))
        quantiles = np.asarray(law.quantile([0.1, 0.5, 0.9])).reshape(-1, 3, len(of_y))
        probability = law.probability(f"y0 <= {float(Y['y0'][0])!r}")
        assert np.isfinite(fit.score(X, Y))
        means = [np.asarray(each.mean()) for each in (law, again)]
    assert np.isfinite(quantiles).all()
    assert (np.diff(quantiles, axis=1) >= 0.0).all()
    assert np.isfinite(means[0]).all()
    np.testing.assert_array_equal(*means)
    assert np.isfinite(np.asarray(law.sample(2))).all()
    assert ((probability >= 0.0) & (probability <= 1.0 + 1e-12)).all()
