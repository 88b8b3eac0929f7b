"""Events, parsed from text, and declared functions."""

import ast
import math
import operator
import re
import sys
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from types import FunctionType
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from cme_dask.data.columns import Columns, labels_have_no_mean
from cme_dask.errors import DataError

# Events such as ``50 < PM2.5 < 75 and station == "Dongsi"``, from text; nothing is executed


Array = Any
Labels = Mapping[str, Sequence[str]]
"""Labels of the codes 0, 1, ... by categorical column."""
Tree = tuple[Any, ...]
"""An operation and its operands: ``("column", 0)``, ``("number", 2.0)``, ``("<", left, right)``."""

_COMPARE: dict[type[ast.cmpop], str] = {
    ast.LtE: "<=",
    ast.GtE: ">=",
    ast.Lt: "<",
    ast.Gt: ">",
    ast.Eq: "==",
    ast.NotEq: "!=",
}
_ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
}
_APPLY: dict[str, Callable[[Any, Any], Any]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
    "==": operator.eq,
    "!=": operator.ne,
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "and": operator.and_,
    "or": operator.or_,
}

_FORM = (
    "an event reads COLUMN <= NUMBER, COLUMN > COLUMN + NUMBER, NUMBER < COLUMN < NUMBER, "
    'COLUMN == "LABEL" or COLUMN in ("LABEL", "LABEL"), joined by and, or, not and parentheses'
)
_KEYWORDS = ("and", "or", "not", "in")
_HINTS = {
    "=": "write == for equality",
    "&": "write and",
    "|": "write or",
    "~": "write not",
    "!": "write not",
}
_SIGN = re.compile(r"<=|>=|==|!=|[<>+\-*/()\[\],]")
_NUMBER = re.compile(r"(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w.])")
_WORD = re.compile(r"[\w.]+")
_QUOTED = re.compile(r"\"([^\"]*)\"|'([^']*)'|`([^`]*)`")
_UNQUOTED = re.compile(r"(?:(?!\s+(?:and|or)\b)[^)'\"])+")  # a label, where none is known
_LONGEST, _DEEPEST = 10_000, 200


@dataclass(frozen=True)
class Event:
    """Indicator of an event.

    Called with rows (n, d), it returns zeros and ones of shape (n,).

    Attributes
    ----------
    tree
        The event as nested tuples of operations, positions of columns and numbers.
    text
        What it was parsed from, if it was.
    """

    tree: Tree
    text: str = field(default="", compare=False)

    def __call__(self, rows: Array) -> Array:
        """Return 1 where the event holds, else 0."""
        xp = array_namespace(rows)
        with np.errstate(all="ignore"):  # a quotient may be infinite: comparisons can take that
            return xp.astype(_evaluate(self.tree, rows), xp.float64)

    @classmethod
    def parse(cls, text: str, names: Sequence[str], labels: Labels | None = None) -> "Event":
        """Parse the text of an event.

        Comparisons ``<=``, ``<``, ``>=``, ``>``, ``==``, ``!=`` may be chained (``50 < y < 75``)
        and joined by ``and``, ``or``, ``not`` and parentheses, which bind as in Python. Operands
        are columns, numbers, and their sums, differences, products and quotients. Categorical
        columns compare with their labels, by ``==``, ``!=``, ``in`` and ``not in``; after ``==``
        and ``!=`` the quotes around a label may be left out. Backquotes enclose the name of a
        column that reads as something else, such as ```2024```.

        Parameters
        ----------
        text
            The event.
        names
            Names of the columns.
        labels
            Labels of the codes 0, 1, ... by categorical column. Where a column has none, they
            aren't known yet: the form is checked, and the event equals no label.

        Raises
        ------
        DataError
            If the text has another form, names an unknown column or label, or holds a number that
            is not finite; with the position of what is wrong.
        """
        return cls(_Parser(text, tuple(names), labels or {}).tree(), text)

    @classmethod
    def of(cls, text: str, columns: Columns, known: Sequence[str], advice: str = "") -> "Event":
        """The event of these columns; DataError with the names that are known if it is none."""
        try:
            return cls.parse(text, columns.names, columns.categories)
        except DataError as error:
            names = ", ".join(map(repr, known))
            raise DataError(
                f"{text!r} is neither one of {names} nor an event ({error}){advice}"
            ) from error


def comparison(column: str, label: str) -> str:
    """The text of the event that a column holds this label."""
    quote = "'" if '"' in label else '"'
    plain = column not in _KEYWORDS and _NUMBER.fullmatch(column) is None
    return f"{column if plain else f'`{column}`'} == {quote}{label}{quote}"


def looks_like_event(text: str) -> bool:
    """Whether a text compares something: an event, though perhaps a wrong one, and no name."""
    return re.search(r"[<>=!]|\bin\b", text) is not None


def _evaluate(tree: Tree, rows: Array) -> Any:
    kind, *operands = tree
    if kind == "column":
        return rows[:, operands[0]]
    if kind == "number":
        return operands[0]
    values = [_evaluate(operand, rows) for operand in operands]
    if kind == "not":
        return ~values[0]
    if kind == "negative":
        return -values[0]
    return reduce(_APPLY[kind], values)


@dataclass(frozen=True)
class _Token:
    """A piece of an event: a ``column``, ``number``, ``label``, ``word`` or ``sign``."""

    kind: str
    value: Any
    start: int


class _Parser:
    """Names and numbers are cut out here; Python's own parser says how they are joined.

    Names of columns need not be names in Python (``PM2.5``), so that each operand is replaced by a
    placeholder before Python parses the text. Its tree is read and never executed.
    """

    def __init__(self, text: str, names: tuple[str, ...], labels: Labels) -> None:
        self.text, self.names, self.labels = text, names, labels
        self.by_length = sorted(filter(None, names), key=len, reverse=True)
        self.tokens: list[_Token] = []

    def tree(self) -> Tree:
        if len(self.text) > _LONGEST:
            raise DataError(
                f"an event may have {_LONGEST:,} characters, got {len(self.text):,}: declare a "
                "function instead"
            )
        self._cut()
        pieces = [
            token.value if token.kind == "sign" else f"_{k}" for k, token in enumerate(self.tokens)
        ]
        self.starts = [0]
        for piece in pieces:
            self.starts.append(self.starts[-1] + len(piece) + 1)
        try:
            parsed = ast.parse(" ".join(pieces), mode="eval").body
            return self._truth(parsed)
        except SyntaxError as error:
            place = (error.offset or self.starts[-1] + 1) - 1
            raise self._error(_FORM, self._token_at(place)) from error
        except (RecursionError, MemoryError, ValueError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError("the event is nested too deeply: declare a function instead") from error

    # From text to tokens

    def _cut(self) -> None:
        at = 0
        while at < len(self.text):
            if self.text[at].isspace():
                at += 1
                continue
            kind, value, end = self._next(at)
            self.tokens.append(_Token(kind, value, at))
            at = end

    def _next(self, at: int) -> tuple[str, Any, int]:
        """Kind, value and end of the token that starts here."""
        quoted = _QUOTED.match(self.text, at)
        if quoted is not None:
            if quoted[3] is not None:
                return "column", self._known(quoted[3], at), quoted.end()
            return "label", quoted[1] if quoted[2] is None else quoted[2], quoted.end()
        label = self._label(at)
        if label is not None:
            return "label", label, at + len(label)
        number, word = _NUMBER.match(self.text, at), _WORD.match(self.text, at)
        if number is not None:
            if number[0] in self.names:
                raise self._error(
                    f"{number[0]!r} is a number and a column: write `{number[0]}` for the column, "
                    f"{float(number[0])!r} for the number",
                    at,
                )
            return "number", float(number[0]), number.end()
        if word is not None and word[0] in _KEYWORDS:
            return "sign", word[0], word.end()
        for name in self.by_length:
            if self.text.startswith(name, at) and _ends(self.text, at + len(name), name):
                return "column", name, at + len(name)
        sign = _SIGN.match(self.text, at)
        if sign is not None:
            return "sign", sign[0], sign.end()
        if word is not None:
            return "word", word[0], word.end()
        hint = _HINTS.get(self.text[at])
        raise self._error(_FORM if hint is None else f"{hint}; {_FORM}", at)

    def _label(self, at: int) -> str | None:
        """The label without quotes that starts here, if a column with labels is compared."""
        if len(self.tokens) < 2 or self.tokens[-1].value not in ("==", "!="):
            return None
        column = self.tokens[-2]
        if column.kind != "column" or column.value not in self.labels:
            return None
        for label in sorted(self.labels[column.value], key=len, reverse=True):
            end = at + len(label)
            follows = self.text[end : end + 1]
            if label and self.text.startswith(label, at) and (follows in ")," or follows.isspace()):
                return label
        rest = _UNQUOTED.match(self.text, at)
        return None if rest is None else rest[0].rstrip()

    # From Python's tree to ours

    def _truth(self, node: ast.expr, depth: int = 0) -> Tree:
        """An event."""
        self._check_depth(depth)
        if isinstance(node, ast.BoolOp):
            kind = "and" if isinstance(node.op, ast.And) else "or"
            return (kind, *(self._truth(value, depth + 1) for value in node.values))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return ("not", self._truth(node.operand, depth + 1))
        if not isinstance(node, ast.Compare):
            raise self._error(_FORM, self._start(node))
        operands = [node.left, *node.comparators]
        pairs = [
            self._comparison(op, left, right, depth + 1)
            for op, left, right in zip(node.ops, operands, operands[1:], strict=False)
        ]
        return pairs[0] if len(pairs) == 1 else ("and", *pairs)

    def _comparison(self, op: ast.cmpop, left: ast.expr, right: ast.expr, depth: int) -> Tree:
        if isinstance(op, (ast.In, ast.NotIn)):
            several = right.elts if isinstance(right, (ast.Tuple, ast.List)) else [right]
            if not several:
                raise self._error("an event asks for no label or number: list some", right)
            each = tuple(self._comparison(ast.Eq(), left, one, depth) for one in several)
            member = each[0] if len(each) == 1 else ("or", *each)
            return ("not", member) if isinstance(op, ast.NotIn) else member
        if type(op) not in _COMPARE:
            raise self._error(_FORM, left)
        compare = _COMPARE[type(op)]
        for here, there in ((left, right), (right, left)):
            token = self._operand(here)
            if token is not None and token.kind == "column" and token.value in self.labels:
                code = ("number", self._code(token, compare, there))
                return (compare, ("column", self.names.index(token.value)), code)
        for here, there in ((left, right), (right, left)):
            token = self._operand(here)
            if token is not None and token.kind == "label":
                self._value(there, depth)  # which may be wrong itself
                other = self._operand(there)
                name = "the other side" if other is None else repr(other.value)
                raise self._error(
                    f"{name} holds numbers, which no label fits: leave out the quotes", here
                )
        tree = (compare, self._value(left, depth), self._value(right, depth))
        if "column" not in (_kinds(tree[1]) | _kinds(tree[2])):
            raise self._error(f"a comparison without a column; {_FORM}", left)
        return tree

    def _code(self, column: _Token, compare: str, other: ast.expr) -> float:
        """The code of the label that a column is compared with; NaN if it isn't known yet."""
        name, token = column.value, self._operand(other)
        if token is not None and token.kind == "column":
            raise self._error(
                f"{name!r} holds labels: {token.value!r} can't be compared with it", token.start
            )
        if compare not in ("==", "!=") or token is None:
            raise self._error(
                f"{name!r} holds labels: compare it by == or !=, or by in, with one of them",
                column.start,
            )
        known = self.labels[name]
        if not known:
            return math.nan
        label = token.value
        if token.kind == "number":
            result = _NUMBER.match(self.text, token.start)
            label = "" if result is None else result[0]
        if label not in known:
            raise self._error(
                f"column {name!r} has no label {label!r}: there are {', '.join(map(repr, known))}",
                token.start,
            )
        return float(known.index(label))

    def _value(self, node: ast.expr, depth: int) -> Tree:
        """A number at each row."""
        self._check_depth(depth)
        token = self._operand(node)
        if token is not None:
            return self._number_or_column(token)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
            value = self._value(node.operand, depth + 1)
            if isinstance(node.op, ast.UAdd):
                return value
            return ("number", -value[1]) if value[0] == "number" else ("negative", value)
        if not isinstance(node, ast.BinOp) or type(node.op) not in _ARITHMETIC:
            raise self._error(_FORM, node)
        sign = _ARITHMETIC[type(node.op)]
        left, right = self._value(node.left, depth + 1), self._value(node.right, depth + 1)
        if left[0] == right[0] == "number":
            if sign == "/" and right[1] == 0.0:
                raise self._error("a number is divided by 0", node)
            return ("number", self._finite(_APPLY[sign](left[1], right[1]), self._start(node)))
        return (sign, left, right)

    def _number_or_column(self, token: _Token) -> Tree:
        if token.kind == "number":
            return ("number", self._finite(token.value, token.start))
        if token.kind == "word" and token.value.lower() in ("inf", "infinity", "nan"):
            self._finite(math.inf, token.start)
        if token.kind == "label":
            raise self._error(f"a label, {token.value!r}, where a number is expected", token.start)
        name = self._known(token.value, token.start)
        if name in self.labels:
            raise self._error(
                f"{name!r} holds labels: compare it by == or !=, or by in", token.start
            )
        return ("column", self.names.index(name))

    # What went wrong, and where

    def _operand(self, node: ast.expr) -> _Token | None:
        return self.tokens[int(node.id[1:])] if isinstance(node, ast.Name) else None

    def _start(self, node: ast.expr) -> int:
        return self._token_at(node.col_offset)

    def _token_at(self, offset: int) -> int:
        """Where in the text the token at this offset of Python's text starts."""
        place = bisect_right(self.starts, offset) - 1
        return self.tokens[place].start if place < len(self.tokens) else len(self.text)

    def _known(self, name: str, at: int) -> str:
        if name not in self.names:
            raise self._error(
                f"unknown column {name!r} in an event: there are {', '.join(self.names)}", at
            )
        return name

    def _finite(self, value: float, at: int) -> float:
        if not math.isfinite(value):
            raise self._error("the bound must be finite", at)
        return value

    def _check_depth(self, depth: int) -> None:
        if depth > _DEEPEST:
            raise RecursionError

    def _error(self, problem: str, at: int | ast.expr) -> DataError:
        start = at if isinstance(at, int) else self._start(at)
        shown = self.text if len(self.text) <= 200 else f"{self.text[:200]}..."
        return DataError(f"{problem} (at character {start + 1} of the event {shown!r})")


def _ends(text: str, end: int, name: str) -> bool:
    """Whether the name of a column ends here, and not in the middle of a longer word."""
    rest = text[end : end + 2]
    continues = rest[:1].isalnum() or rest[:1] == "_" or (rest[:1] == "." and rest[1:].isalnum())
    return not (continues and (name[-1].isalnum() or name[-1] == "_"))


def _kinds(tree: Tree) -> set[str]:
    """All operations of a tree."""
    kinds = {tree[0]}
    if tree[0] not in ("column", "number"):
        kinds.update(*(_kinds(operand) for operand in tree[1:]))
    return kinds


# Declared functions in pickles, which hold those alone that can be imported by name


Function = Callable[[Array], Array]


@dataclass(frozen=True)
class LocalFunction:
    """Stands in a pickle for a declared function that cannot be imported by its name.

    Its conditional expectations are exact moments and stay in the model; only the function itself
    is lost, as it is in saved models.
    """

    name: str

    def __call__(self, rows: Array) -> Array:
        """DataError: the function is not there."""
        raise DataError(
            f"the function {self.name!r} was a lambda or a local function, which a pickle cannot "
            "hold: define it at the top level of a module, or pass the function itself"
        )


def importable(functions: Mapping[str, Function]) -> dict[str, Function]:
    """The functions, with a :class:`LocalFunction` for each that pickle could not import."""
    return {
        name: LocalFunction(name) if _is_local(function) else function
        for name, function in functions.items()
    }


def _is_local(function: Any) -> bool:
    """Whether this is a function that is not found under its name in its module."""
    if not isinstance(function, FunctionType):  # other objects are pickled in their own ways
        return False
    result: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        result = getattr(result, name, None)
    return result is not function


# Functions as users declare them


FunctionsLike = Mapping[str, Function | str] | Sequence[str]
"""Functions to be declared: callables or events by name, or a list of events."""


def by_name(functions: FunctionsLike | None) -> Mapping[str, Function | str]:
    """Functions as users give them, by name; DataError unless they are that."""
    given = {} if functions is None else functions
    if isinstance(given, (list, tuple)) and all(isinstance(text, str) for text in given):
        given = dict(zip(given, given, strict=True))
    if not isinstance(given, Mapping):
        raise DataError(
            f"functions maps names to callables, got {functions!r}: give {{'name': f}}, or list "
            "events such as ['y0 > 0']"
        )
    return given


def declared(functions: FunctionsLike | None, columns: Columns) -> dict[str, Function]:
    """Declared functions by name; DataError unless they are that, and no columns."""
    given = by_name(functions) if functions else {}
    result: dict[str, Function] = {
        name: Event.parse(f, columns.names, columns.categories) if isinstance(f, str) else f
        for name, f in given.items()
    }
    for name, function in result.items():
        if not isinstance(name, str) or not callable(function):
            raise DataError(f"functions maps names to callables, got {name!r}: {function!r}")
        if name in columns.names:
            raise DataError(f"{name!r} is a column already: give the function another name")
    return result


# Functions of rows that queries ask for


@dataclass(frozen=True)
class Level:
    """The indicator of a code."""

    code: int

    def __call__(self, rows: Array) -> Array:
        """Indicators, shape (n,), at rows (n, 1)."""
        return rows[:, 0] == self.code


def numeric_columns(columns: Columns) -> tuple[str, ...]:
    """Names of the columns that hold numbers; DataError if there are none."""
    if not columns.numeric:
        raise labels_have_no_mean(columns.names[0], columns)
    return columns.numeric


def function_of(f: Any, columns: Columns) -> Function:
    """The function of rows that a text stands for, a column of numbers or an event, or f itself."""
    if callable(f):
        function: Function = f
        return function
    if not isinstance(f, str):
        raise DataError(f"expect takes columns, events and functions of rows, got {f!r}")
    if f in columns.categories:
        raise labels_have_no_mean(f, columns)
    if f not in columns.names and not looks_like_event(f):
        raise DataError(f"unknown column {f!r}: there are {columns.listed()}")
    if f not in columns.names:
        return Event.of(f, columns, columns.names, ": give the function itself")
    position = columns.names.index(f)
    return lambda rows: rows[:, position]
