"""Regression trees fitted to rows: three kinds, as plain arrays, and the memory they take.

Scikit-learn's trees are imported where they are needed: answers of models do not need them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, Self, cast

import numpy as np

from cme_dask.numerics.folds import relative_weights, sklearn_seed
from cme_dask.numerics.scoring import column_deviations
from cme_dask.numerics.trees import Tree, TreeMean

Array = Any

PARTS = 5
"""Fits that a cross-fit takes: folds are left out in pairs, or as they are where they are fewer."""


class Growth(NamedTuple):
    """How trees are boosted.

    Attributes
    ----------
    steps
        Numbers of steps, the next one where nearly all of the one before are used.
    length
        Of a step.
    leaves
        Of a tree, at most.
    """

    steps: tuple[int, ...]
    length: float
    leaves: int


_GROWTH = Growth((50, 150, 450), 0.1, 31)
_FEW, _GROWTH_OF_FEW = 1200, Growth((40, 120, 360), 0.2, 12)  # rows, and boosting on fewer
_TRIAL_GROWTH = Growth((45,), 1 / 3, 12)
_LEAF = 10  # rows of a leaf of boosting, at least
_FOREST, _TRIAL_FOREST = 100, 30  # trees, and those that are fitted first
_SEEDS = np.iinfo(np.int32).max  # of them, as scikit-learn draws them
_MANY_NUMBERS = 100_000  # of x, from which on threads serve boosting
_LEAVES = 2000  # of a tree of a forest, about: leaves of more rows where there are many
_NODE, _WORD = 72, 8  # bytes of a node of scikit-learn, and of a number
_WAYS = 32  # bytes of a node in the tables by which rows find their leaves


# From scikit-learn's trees to arrays


def tree_mean(
    regressor: Any, widths: tuple[int, int], *, covariate: bool, steps: int | None = None
) -> TreeMean | None:
    """A fitted regressor as arrays, if it is a sum of regression trees; else None.

    Parameters
    ----------
    regressor
        Of scikit-learn: a decision tree, a forest, gradient boosting, gradient boosting on
        histograms without categories, or one of these for each column of y.
    widths
        Numbers d and q of the columns of x and of y.
    covariate
        See :class:`TreeMean`.
    steps
        Of boosting on histograms, as many as count; default all.
    """
    from sklearn import ensemble
    from sklearn.multioutput import MultiOutputRegressor

    name, (d, q) = type(regressor).__name__, widths
    if isinstance(regressor, MultiOutputRegressor):
        each = [
            tree_mean(one, (d, 1), covariate=covariate, steps=steps)
            for one in regressor.estimators_
        ]
        return None if None in each else _stacked(each, covariate)  # type: ignore[arg-type]
    found = _trees(regressor, q, steps)
    if found is None:
        return None
    constant, trees, single = found
    # The trees of a forest predict y each.
    spread = isinstance(regressor, (ensemble.RandomForestRegressor, ensemble.ExtraTreesRegressor))
    return TreeMean.of(name, d, constant, trees, single=single, covariate=covariate, spread=spread)


def _trees(regressor: Any, q: int, steps: int | None) -> tuple[Array, list[Tree], bool] | None:
    """The constant, the trees, and whether they compare float32."""
    from sklearn import ensemble
    from sklearn.tree import DecisionTreeRegressor

    if isinstance(regressor, ensemble.HistGradientBoostingRegressor):
        plain = regressor.loss in ("squared_error", "absolute_error", "quantile")
        if not plain or regressor.is_categorical_ is not None:
            return None
        constant = np.ravel(regressor._baseline_prediction)
        return constant, _binned([one.nodes for (one,) in regressor._predictors[:steps]]), False
    if isinstance(regressor, DecisionTreeRegressor):
        return np.zeros(q), [_exact(regressor.tree_, 1.0, q)], True
    if isinstance(regressor, (ensemble.RandomForestRegressor, ensemble.ExtraTreesRegressor)):
        each = regressor.estimators_
        return np.zeros(q), [_exact(tree.tree_, 1.0 / len(each), q) for tree in each], True
    if isinstance(regressor, ensemble.GradientBoostingRegressor) and regressor.init is None:
        trees = [
            _exact(each.tree_, regressor.learning_rate, q) for each in regressor.estimators_.flat
        ]
        return (
            np.ravel(regressor.init_.predict(np.zeros((1, regressor.n_features_in_)))),
            trees,
            True,
        )
    return None


def _exact(tree: Any, factor: float, q: int) -> Tree:
    children = np.stack([tree.children_left, tree.children_right], axis=1)
    return Tree(tree.feature, tree.threshold, children, factor * tree.value.reshape(-1, q))


def _binned(nodes_of_trees: Sequence[Array]) -> list[Tree]:
    """All at once: there may be hundreds of trees, of a dozen nodes."""
    # np.concatenate would compare the types of all fields for each tree.
    nodes = np.frombuffer(b"".join(nodes_of_trees), nodes_of_trees[0].dtype)
    children = np.stack([nodes["left"], nodes["right"]], axis=1).astype(np.int64)
    children[nodes["is_leaf"].astype(bool)] = -1
    # A split of missing values from all others has an infinite threshold, which files refuse.
    threshold = np.clip(nodes["num_threshold"], -np.finfo(float).max, np.finfo(float).max)
    arrays = nodes["feature_idx"], threshold, children, nodes["value"][:, None]
    edges = np.cumsum([0, *map(len, nodes_of_trees)]).tolist()
    return [Tree(*(array[first:last] for array in arrays)) for first, last in pairwise(edges)]


def _stacked(each: Sequence[TreeMean], covariate: bool) -> TreeMean:
    """Locations of several columns as one."""
    if len(each) == 1:
        return replace(each[0], covariate=covariate, spread=False)
    trees, q = list[Tree](), len(each)
    for j, mean in enumerate(each):
        edges = np.append(mean.roots, len(mean.feature))
        for first, last in pairwise(edges.tolist()):
            children = mean.children[first:last]
            values = np.zeros((last - first, q))
            values[:, j] = mean.values[first:last, 0]
            trees.append(
                Tree(
                    mean.feature[first:last],
                    mean.threshold[first:last],
                    np.where(children < 0, -1, children - first),
                    values,
                )
            )
    constant = np.concatenate([mean.constant for mean in each])
    one = each[0]
    return TreeMean.of(one.name, one.width, constant, trees, single=one.single, covariate=covariate)


# Kinds of trees


@dataclass(frozen=True, eq=False)
class TrainingRows:
    """Rows that trees are learned on, in random order.

    Attributes
    ----------
    x, y
        Shapes (n, d) and (n, q).
    weights
        Shape (n,), sum 1.
    folds
        Fold number of each row, shape (n,).
    n_folds
        Number of folds F.
    units
        A number for each row that tells which rows are alike, shape (n,).
    seed, threads
        Of what is random, and how many fits run at the same time.
    covariate
        Whether laws of residuals are given mu(x) and the spread of its trees beside x.
    """

    x: Array
    y: Array
    weights: Array
    folds: Array
    n_folds: int
    units: Array
    seed: int
    threads: int = 1
    covariate: bool = True

    @property
    def widths(self) -> tuple[int, int]:
        """Numbers d and q of the columns of x and of y."""
        return self.x.shape[1], self.y.shape[1]

    def first(self, count: int) -> "TrainingRows":
        """The first rows."""
        names = "x", "y", "weights", "folds", "units"
        few = {name: getattr(self, name)[:count] for name in names}
        return replace(self, **few | {"weights": few["weights"] / few["weights"].sum()})

    def only(self, selected: Array) -> tuple[Array, Array, Array | None]:
        """Rows x and y of positive weight, and weights of mean 1, or None for equal ones."""
        selected = selected & (self.weights > 0.0)
        return self.x[selected], self.y[selected], relative_weights(self.weights[selected])


def in_one_thread(kind: str, rows: TrainingRows) -> bool:
    """Whether fits of a kind take less time one after the other than in threads.

    Boosting on few numbers holds the interpreter most of the time. Two threads of it took 1.1 to
    1.9 times as long as one on 5,500 to 64,000 numbers, and 0.7 to 0.9 times as long on 160,000.
    """
    return bool(KINDS[kind] is not _Forest and rows.x.size < _MANY_NUMBERS)


def growth_of(rows: int) -> Growth:
    """How trees of so many rows are boosted: of few, those with few leaves predict better."""
    return _GROWTH_OF_FEW if rows < _FEW else _GROWTH


class _Boosting:
    """Gradient boosting of each column of y, on histograms."""

    words, by_need, leaves = "boosted trees", True, _GROWTH.leaves

    def __init__(
        self, rows: TrainingRows, selected: Array, quick: bool = False, steps: int | None = None
    ) -> None:
        from sklearn.ensemble import HistGradientBoostingRegressor

        x, y, weights = rows.only(selected)
        growth = _TRIAL_GROWTH if quick else growth_of(len(rows.x))
        deviations = column_deviations(rows.y, rows.weights)
        # Gradients are of single precision, of less range. Powers of two do not round.
        exponents = np.floor(np.log2(np.where(np.isfinite(deviations), deviations, 1.0)))
        self._units = np.exp2(exponents)
        self._first = [self._tree(x, column[:, None], weights, rows.seed) for column in y.T]
        self._each = [
            HistGradientBoostingRegressor(
                learning_rate=growth.length,
                max_iter=steps or growth.steps[0],
                max_leaf_nodes=min(self.leaves, growth.leaves),
                min_samples_leaf=_LEAF,
                early_stopping=False,
                warm_start=True,
                random_state=sklearn_seed(rows.seed),
            ).fit(x, column, weights)
            for column in self._left(x, y)
        ]

    def _tree(self, x: Array, y: Array, weights: Array | None, seed: int) -> TreeMean | None:
        """A tree before the steps, of one column of y, or None."""
        return None

    def _left(self, x: Array, y: Array) -> Iterator[Array]:
        """What the first trees leave of each column, in its unit."""
        for tree, column, unit in zip(self._first, y.T, self._units, strict=True):
            yield (column if tree is None else column - tree(x)[:, 0]) / unit

    @staticmethod
    def stages(rows: TrainingRows, quick: bool) -> tuple[int, ...]:
        """Numbers of steps, see :class:`Growth`."""
        return (_TRIAL_GROWTH if quick else growth_of(len(rows.x))).steps

    def extended(self, rows: TrainingRows, selected: Array, steps: int) -> Self:
        """With more steps, of the same rows."""
        x, y, weights = rows.only(selected)
        for one, column in zip(self._each, self._left(x, y), strict=True):
            one.set_params(max_iter=steps).fit(x, column, weights)
        return self

    def losses(self, x: Array, y: Array, weights: Array) -> Array:
        """Weighted squared error after each step, sum over the columns of y, shape (S,)."""
        losses: Any = 0.0
        each = zip(self._each, self._left(x, y), weights.T, self._units, strict=True)
        for one, column, w, unit in each:
            stages, w = one.staged_predict(x), unit * w * unit
            losses = losses + np.array([w @ (stage - column) ** 2 for stage in stages])
        return np.asarray(losses)

    def mean(self, rows: TrainingRows, steps: int) -> TreeMean:
        """As arrays."""
        each, (d, _) = [], rows.widths
        for first, one, unit in zip(self._first, self._each, self._units, strict=True):
            found = _trees(one, 1, steps)
            assert found is not None
            constant, trees, single = found
            if first is not None:
                # Thresholds lie between the rows: float64 compares as well as float32.
                constant = constant + first.constant / unit
                values = first.values / unit
                trees.append(Tree(first.feature, first.threshold, first.children, values))
            name, covariate = type(one).__name__, rows.covariate
            mean = TreeMean.of(name, d, constant, trees, single=single, covariate=covariate)
            each.append(replace(mean, constant=unit * mean.constant, values=unit * mean.values))
        return _stacked(each, rows.covariate)


class _Shallow(_Boosting):
    """The same with trees of few leaves, for jumps and for few columns that matter.

    The first one has exact thresholds: histograms would blur where y jumps.
    """

    words, leaves = "shallow boosted trees", 4

    def _tree(self, x: Array, y: Array, weights: Array | None, seed: int) -> TreeMean | None:
        from sklearn.tree import DecisionTreeRegressor

        # Of equally good splits the seed takes one: without it, the next fit has another law.
        tree = DecisionTreeRegressor(
            max_leaf_nodes=self.leaves, min_samples_leaf=_LEAF, random_state=sklearn_seed(seed)
        )
        return _in_units(lambda scaled: tree.fit(x, scaled, weights), x, y, covariate=False)


class _Forest:
    """Extremely randomised trees of all columns of y."""

    words, by_need = "randomised trees", False

    def __init__(
        self, rows: TrainingRows, selected: Array, quick: bool = False, steps: int | None = None
    ) -> None:
        x, y, weights = rows.only(selected)
        self._trees: list[Any] = []
        self._most = self.stages(rows, quick)[-1]
        self._grown(rows, x, y, weights, steps or self._most)

    @staticmethod
    def stages(rows: TrainingRows, quick: bool) -> tuple[int, ...]:
        """Numbers of trees."""
        return (_TRIAL_FOREST,) if quick else (min(_TRIAL_FOREST, _FOREST), _FOREST)

    def _grown(
        self, rows: TrainingRows, x: Array, y: Array, weights: Array | None, count: int
    ) -> None:
        """Fit those of so many trees that are not fitted yet."""
        from sklearn.ensemble import ExtraTreesRegressor
        from sklearn.tree import ExtraTreeRegressor

        leaf = max(1, len(x) // _LEAVES)
        single, seed = np.ascontiguousarray(x, dtype=np.float32), sklearn_seed(rows.seed)

        def fit(y: Array) -> Any:
            """Tree by tree, as a forest does.

            A forest itself changes the process's filters of warnings for each tree, and the parts
            are fitted in threads.
            """
            forest = ExtraTreesRegressor(count)
            seeds = np.random.RandomState(seed).randint(_SEEDS, size=count)
            self._trees += [
                ExtraTreeRegressor(max_features=1.0, min_samples_leaf=leaf, random_state=each).fit(
                    single, y, weights, check_input=False
                )
                for each in seeds[len(self._trees) :]
            ]
            forest.estimators_ = self._trees
            return forest

        self._mean = _in_units(fit, x, y, covariate=rows.covariate)
        if count >= self._most:
            self._trees = []  # there will be no more

    def extended(self, rows: TrainingRows, selected: Array, steps: int) -> Self:
        """With more trees, of the same rows."""
        self._grown(rows, *rows.only(selected), steps)
        return self

    def losses(self, x: Array, y: Array, weights: Array) -> Array:
        """One number: all trees count."""
        return np.zeros(1)

    def mean(self, rows: TrainingRows, steps: int) -> TreeMean:
        """As arrays."""
        return self._mean


def _in_units(fit: Callable[[Array], Any], x: Array, y: Array, *, covariate: bool) -> TreeMean:
    """Trees fitted to y in its own units: they take small differences of large numbers for none."""
    centre, share = y.mean(axis=0), np.full(len(y), 1.0 / len(y))
    unit = column_deviations(y, share)
    scaled = (y - centre) / unit
    trees = fit(scaled[:, 0] if y.shape[1] == 1 else scaled)
    mean = cast(TreeMean, tree_mean(trees, (x.shape[1], y.shape[1]), covariate=covariate))
    unit = np.where(np.isfinite(unit), unit, 0.0)
    return replace(mean, constant=centre + unit * mean.constant, values=unit * mean.values)


KINDS: dict[str, Any] = {"boosting": _Boosting, "shallow": _Shallow, "forest": _Forest}
"""Kinds of trees, by the names that :class:`cme_dask.Tuning` gives them."""


def trees_bytes(rows: int, columns: tuple[int, int], threads: int, parts: int = PARTS) -> int:
    """Peak of the comparison of trees, and of fitting the best ones to all rows.

    Parameters
    ----------
    rows
        Of the row sample.
    columns
        Numbers d and q of the columns of x and of y.
    threads
        Fits that run at the same time.
    parts
        Fits of each kind.
    """
    d, q = columns
    # Of each fit at the same time: its rows, as float32 once more, binned, sorted and predicted.
    working = min(threads, parts) * rows * (2 * d + 6 * q) * _WORD
    # Nodes of all trees of a fit: a forest's leaves hold one and a half times the least rows.
    leaf = max(1, rows // _LEAVES)
    forest = _FOREST * 2 * int(rows / (1.5 * leaf if leaf > 1 else 1.0))
    growth = growth_of(rows)
    boosted = q * growth.steps[-1] * 2 * growth.leaves
    nodes = parts * (forest + 2 * boosted)
    # Of a kind scikit-learn's trees stand beside the arrays, which all kinds retain.
    arrays = nodes * ((4 + q) * _WORD + _WAYS)
    return working + arrays + parts * max(forest, boosted) * (_NODE + q * _WORD)
