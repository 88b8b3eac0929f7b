"""``JointClassifier`` and ``EmbeddingClassifier``: class probabilities from laws of a label."""

from dataclasses import replace
from typing import Any

from cme_dask.estimators.embedding import ConditionalMeanEmbedding
from cme_dask.estimators.joint import JointDistribution
from cme_dask.estimators.joint_fit import Fitted
from cme_dask.estimators.predictors import GrowingClassifier, Level
from cme_dask.estimators.recipe import FunctionsLike, by_name
from cme_dask.models.labels import FloatArray
from cme_dask.models.predicting import class_name

Array = Any


class JointClassifier(GrowingClassifier, JointDistribution):  # type: ignore[misc]
    r"""Classifier by the conditional law of a label: non-negative probabilities with sum 1.

    A :class:`JointDistribution` whose y is one column of labels. Attributes and queries are its
    own, and the model is one of both variables: X given the label can be asked, too.

    ``predict_proba`` is positive: with n rows and K labels it is :math:`(n p + 1 / K) / (n + 1)`,
    as if one more row had been seen, shared evenly among the labels, so that the log loss of a
    label that the law excludes is about :math:`\log (n K)` and not infinite. The law itself
    (``conditional(X).predict_proba()``) gives p, which may be exactly zero.

    Parameters
    ----------
    kernel_x, kernel_y, tol, max_rank, reg, reg_form, constraint, convergence
        As in :class:`JointDistribution`.
    pivots, span, sample_size, n_folds, support_size, residual, calibration, accuracy, tuning
        As in :class:`JointDistribution`; labels have no residuals and no levels to calibrate.
    random_state
        As in :class:`JointDistribution`.

    Attributes
    ----------
    classes_ : (K,) array
        The labels, ascending; of a store in the order of its codes.

    Examples
    --------
    >>> import numpy as np
    >>> from cme_dask import JointClassifier
    >>> rng = np.random.default_rng(0)
    >>> x = rng.normal(size=(2_000, 2))
    >>> label = np.where(x[:, 0] + 0.5 * rng.normal(size=2_000) > 0, "up", "down")
    >>> model = JointClassifier(kernel_x="median", reg=1e-3).fit(x, label)
    >>> model.predict([[2.0, 0.0], [-2.0, 0.0]]).tolist()
    ['up', 'down']
    """

    _every_label = True

    def _become(self, found: Fitted) -> None:
        about = found.model.about | {"classes": plain_labels(self._classes)}
        super()._become(replace(found, model=replace(found.model, about=about)))

    def _probabilities(self, X: Any) -> Array:
        return self._fitted().predict_proba(X)


class EmbeddingClassifier(GrowingClassifier, ConditionalMeanEmbedding):  # type: ignore[misc]
    r"""Classifier by the conditional mean embedding of a label.

    :math:`P(Y = c | x) = \mathrm E[1\{Y = c\} | x]` of :class:`ConditionalMeanEmbedding` is signed
    and need not add up to one; ``predict_proba`` gives the nearest probabilities (Euclidean
    projection onto the simplex), which have the same order, mixed with one more row that is shared
    evenly among the labels, as in :class:`JointClassifier`: so they are positive.

    Parameters
    ----------
    kernel_x, kernel_y, tol, max_rank, reg, criterion
        As in :class:`ConditionalMeanEmbedding`.
    pivots, span, sample_size, n_folds, accuracy, random_state
        As in :class:`ConditionalMeanEmbedding`.

    Attributes
    ----------
    classes_ : (K,) array
        The labels, ascending; of a store in the order of its codes.
    """

    def signed_proba(self, X: Any) -> FloatArray:
        """The estimates as they are, shape (n, K): they may be negative.

        Parameters
        ----------
        X
            Points, shape (n, d_X), or a table with the columns by name.
        """
        model = self._fitted()
        return model.expect([class_name(code) for code in range(len(self.classes_))], X)

    def _probabilities(self, X: Any) -> Array:
        return self._fitted().predict_proba(X)

    def _about(self, *of_fit: Any) -> dict[str, Any]:
        return super()._about(*of_fit) | {"classes": plain_labels(self._classes)}

    def _declared(self, functions: FunctionsLike | None) -> FunctionsLike | None:
        indicators = {class_name(code): Level(code) for code in range(len(self._classes))}
        return {**by_name(functions), **indicators}


def plain_labels(classes: Array) -> list[Any] | None:
    """The labels as a file may hold them in their own types; None if it may not."""
    labels = classes.tolist()
    return labels if all(isinstance(each, (str, bool, int, float)) for each in labels) else None
