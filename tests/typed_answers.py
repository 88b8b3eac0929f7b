"""Types of answers that checkers and editors know: mypy reads this file, and nothing runs it."""

from typing import assert_type

import numpy as np
from numpy.typing import NDArray

from cme_dask import ConditionalLaw, JointDistribution, LazyLaw, open_sample

Floats = NDArray[np.float64]

fit = JointDistribution().fit(np.zeros((9, 1)), np.zeros((9, 1)))
law = fit.conditional(np.zeros((2, 1)))
assert_type(law, ConditionalLaw)
assert_type(law.mean(), Floats)
assert_type(law.interval(), tuple[Floats, Floats])
assert_type(fit.conditional(open_sample("s.zarr")), LazyLaw)
assert_type(fit.expect("y0", np.zeros((2, 1))), Floats)
assert_type(fit.expect("y0", np.zeros((2, 1)), return_std=True), tuple[Floats, Floats])
assert_type(fit.predict(np.zeros((2, 1))), Floats)
assert_type(fit.model_.conditional(np.zeros((2, 1))), ConditionalLaw)
