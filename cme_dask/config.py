"""Numbers that the estimators, the job files and the command share; light to import."""

VARIABLES = "xyz"
"""Names of the variables in their order: z is what a test conditions on."""

TOL = 1e-5
"""Relative trace error that bases aim at."""

REG = 1e-6
"""Two-sided ridge."""

COUPLING_REG = 1e-4
"""The same of couplings: held-out loss chose it most often; with less, solutions take longer."""

N_FOLDS = 10
"""Fixed folds whose moments are kept apart."""

ACCURACY = 1e-9
"""Change of density ratios and expectations that faster arithmetic may cause."""

SAMPLE_SIZE = 1 << 15
"""Rows of the row sample: what stores keep, and what pivots are chosen from."""

MAX_RANK = 500
"""Pivots of each learned basis, unless ``max_rank`` says otherwise."""

HELD_ROWS = 4000
"""Rows of the row sample at which laws of refits are judged, at most."""

PIVOTS = ("sampled", "greedy", "random")
"""Ways of choosing pivots."""

ANSWERS = ("mean", "std", "quantile", "interval", "probability", "effective_support")
EMBEDDING_ANSWERS = ("mean", "probability")
"""Quantities that batches of conditional laws are queried for."""

LEVELS = (0.05, 0.5, 0.95)
"""Levels of their quantiles."""

INTERVAL = 0.9
"""Probability of their intervals."""

MISSING = ("error", "drop", "impute")
"""What fits do with rows that lack a value."""

NULL_VALUES = ("", "NA", "N/A", "NaN", "nan", "null", "NULL")
"""Texts in tables that stand for a missing value."""

SCENARIOS = {
    "low": (0.0, 0.0, 0.0),
    "medium": (0.3, -0.3, 0.3),
    "high": (0.7, 0.7, 0.7),
    "strong": (0.3, 0.8, -0.2),
}
"""Correlations (Y1 Y2, Y1 X, Y2 X) of the three-dimensional normal sample.

The joint paper's "high" (0.7, 0.7, -0.7) is no covariance matrix.
"""

ENCRYPTED = "tls://", "wss://"
"""What addresses of encrypted clusters begin with."""
