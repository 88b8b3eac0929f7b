"""cme_dask: joint and conditional distributions learned with kernels, out of core, on Dask.

Public names are loaded when first used, so that queries on a saved model need neither Dask nor
scikit-learn.
"""

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cme_dask import constraints, kernels, metrics, operators, reductions
    from cme_dask.data.ingest import ingest
    from cme_dask.estimators.cholesky import PivotedCholesky
    from cme_dask.estimators.classifiers import (
        EmbeddingClassifier,
        JointClassifier,
        KernelLogisticRegression,
    )
    from cme_dask.estimators.comparison import Comparison, compare
    from cme_dask.estimators.drift import drift_report
    from cme_dask.estimators.embedding import ConditionalMeanEmbedding
    from cme_dask.estimators.filter import KernelBayesFilter
    from cme_dask.estimators.hypotheses import (
        conditional_independence_test,
        independence_test,
        two_sample_test,
    )
    from cme_dask.estimators.joint import JointDistribution
    from cme_dask.estimators.multiclass import MulticlassEmbedding
    from cme_dask.estimators.sizing import ClusterPlan, plan_cluster
    from cme_dask.estimators.sparse import SparseEmbedding
    from cme_dask.estimators.transfer import TransferOperator
    from cme_dask.learning.candidates import Tuning
    from cme_dask.models import load
    from cme_dask.models.law import ConditionalLaw
    from cme_dask.models.merging import merge
    from cme_dask.passes.held_out import ScoreTable, score
    from cme_dask.passes.lazy import gram_columns
    from cme_dask.passes.lazy_laws import LazyLaw
    from cme_dask.passes.progress import Event
    from cme_dask.passes.rates import ClusterRates
    from cme_dask.passes.sources import open_sample
    from cme_dask.reports.score import score_report


__version__ = "0.1.0"

logging.getLogger("cme_dask").addHandler(logging.NullHandler())  # users choose who listens

_HOMES = {
    "ClusterPlan": "cme_dask.estimators.sizing",
    "ClusterRates": "cme_dask.passes.rates",
    "Comparison": "cme_dask.estimators.comparison",
    "ConditionalLaw": "cme_dask.models.law",
    "LazyLaw": "cme_dask.passes.lazy_laws",
    "ConditionalMeanEmbedding": "cme_dask.estimators.embedding",
    "EmbeddingClassifier": "cme_dask.estimators.classifiers",
    "Event": "cme_dask.passes.progress",
    "JointClassifier": "cme_dask.estimators.classifiers",
    "JointDistribution": "cme_dask.estimators.joint",
    "KernelBayesFilter": "cme_dask.estimators.filter",
    "KernelLogisticRegression": "cme_dask.estimators.classifiers",
    "MulticlassEmbedding": "cme_dask.estimators.multiclass",
    "PivotedCholesky": "cme_dask.estimators.cholesky",
    "SparseEmbedding": "cme_dask.estimators.sparse",
    "TransferOperator": "cme_dask.estimators.transfer",
    "Tuning": "cme_dask.learning.candidates",
    "compare": "cme_dask.estimators.comparison",
    "drift_report": "cme_dask.estimators.drift",
    "conditional_independence_test": "cme_dask.estimators.hypotheses",
    "independence_test": "cme_dask.estimators.hypotheses",
    "ingest": "cme_dask.data.ingest",
    "score": "cme_dask.passes.held_out",
    "score_report": "cme_dask.reports.score",
    "ScoreTable": "cme_dask.passes.held_out",
    "gram_columns": "cme_dask.passes.lazy",
    "load": "cme_dask.models",
    "merge": "cme_dask.models.merging",
    "open_sample": "cme_dask.passes.sources",
    "plan_cluster": "cme_dask.estimators.sizing",
    "two_sample_test": "cme_dask.estimators.hypotheses",
}
_MODULES = ("constraints", "errors", "kernels", "metrics", "operators", "reductions")

__all__ = [
    "ClusterPlan",
    "ClusterRates",
    "Comparison",
    "ConditionalLaw",
    "ConditionalMeanEmbedding",
    "EmbeddingClassifier",
    "Event",
    "JointClassifier",
    "JointDistribution",
    "KernelBayesFilter",
    "KernelLogisticRegression",
    "LazyLaw",
    "MulticlassEmbedding",
    "PivotedCholesky",
    "ScoreTable",
    "SparseEmbedding",
    "TransferOperator",
    "Tuning",
    "compare",
    "conditional_independence_test",
    "constraints",
    "drift_report",
    "gram_columns",
    "independence_test",
    "ingest",
    "kernels",
    "load",
    "merge",
    "metrics",
    "open_sample",
    "operators",
    "plan_cluster",
    "reductions",
    "score",
    "score_report",
    "two_sample_test",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"cme_dask.{name}")
    raise AttributeError(f"module 'cme_dask' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, *_MODULES])
