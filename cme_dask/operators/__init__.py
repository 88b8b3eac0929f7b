r"""Operators on functions and laws, learned in one pass over the rows, which can be multiplied.

:func:`measure` takes the moments of a sample in given spaces; what follows from these are
multiplication, quotient, composition, conditional expectation and change of measure, each a small
:class:`Operator`. The sum rule, the chain rule and Bayes' rule are products of such operators.

Source: Grünewälder, Gretton and Shawe-Taylor (2013), Smooth operators.
"""

from cme_dask.models.operators import Eigenvalues, Operator, Reweighting, SingularValues
from cme_dask.models.reweighted import ReweightedModel
from cme_dask.models.spaces import MeanEmbeddings, RKHSFunctions, Space
from cme_dask.numerics.operators import Reciprocal
from cme_dask.operators.measured import OperatorMoments, Risk, composition, measure
from cme_dask.operators.rules import bayes, change_prior, kernel_bayes, reweighting, sum_rule_bound

__all__ = [
    "Eigenvalues",
    "MeanEmbeddings",
    "Operator",
    "OperatorMoments",
    "RKHSFunctions",
    "Reciprocal",
    "ReweightedModel",
    "Reweighting",
    "Risk",
    "SingularValues",
    "Space",
    "bayes",
    "change_prior",
    "composition",
    "kernel_bayes",
    "measure",
    "reweighting",
    "sum_rule_bound",
]
