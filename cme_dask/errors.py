"""The errors and warnings of the package.

The command maps :class:`DataError` to exit code 2 (data or usage) and :class:`ResourceError` to 3
(environment); a message states the expectation, the value and the remedy.
"""

import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

_PACKAGE = f"{Path(__file__).parent}{os.sep}"
_LONGEST = 2000  # letters of a message
_MARKS = re.compile(r"[\x02\x03\x1f]")
_REMEDY = re.compile("\x02([^\x02\x03\x1f]*)\x1f([^\x02\x03\x1f]*)\x03")


_CREDENTIALS = re.compile(r"""(?<=://)[^/\s?#'"<>]*@""")
_SIGNATURE = re.compile(  # bounded, for texts from files may be of any length
    r"""([?&][^=&?\s'"]{0,64}(?:auth|credential|key|passw|secret|sig|token)[^=&?\s'"]{0,64}=)"""
    r"""[^&\s'"<>]+""",
    re.IGNORECASE,
)
# Controls but tabs and ends of lines, and marks that turn the direction of writing.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def without_secrets(text: str) -> str:
    """A text without the passwords in its URLs: users with passwords, and keys of signed ones.

    >>> without_secrets("http://me:secret@example.org/s.zarr?token=1234&part=2")
    'http://***@example.org/s.zarr?token=***&part=2'
    """
    return _SIGNATURE.sub(r"\1***", _CREDENTIALS.sub("***@", text))


def printable(text: str) -> str:
    """A text that does nothing to a terminal: names in files of others may hold its commands."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def remedy(python: str, command: str) -> str:
    """Part of a message that depends on who reads it.

    Parameters
    ----------
    python
        The remedy in Python, such as ``fit with max_rank=...``.
    command
        The same on the command line, such as ``give --max-rank``.

    Returns
    -------
    text
        For the message of a :class:`CmeDaskError`, which shows the first; the command shows the
        second.
    """
    return f"\x02{python}\x1f{command}\x03"


def option(name: str) -> str:
    """A parameter of Python's that the command has as an option: ``max_rank``, ``--max-rank``."""
    return remedy(name, f"--{name.replace('_', '-')}")


def switch(name: str) -> str:
    """A parameter that is set to true, or the command's flag: ``resume=True``, ``--resume``."""
    return remedy(f"{name}=True", f"--{name.replace('_', '-')}")


def wording(text: str, command: bool = False) -> str:
    """A message as Python shows it, or the command."""
    text = _REMEDY.sub(r"\2" if command else r"\1", text)
    return _MARKS.sub("", text)  # of one that was cut


def warn(message: str, category: type[Warning]) -> None:
    """Warn, and name the line outside the package that led here.

    As with errors, Python shows the remedies in Python, and the command shows ``for_command``.
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warning: Any = category(wording(message))
    warning.for_command = wording(message, command=True)
    warnings.warn(warning, stacklevel=level)


class CmeDaskError(Exception):
    """Base of every error that cme_dask raises on purpose."""

    def __str__(self) -> str:
        """The message; text from a file may be of any length, and is cut in the middle."""
        return _shown(wording(super().__str__()))

    def __format__(self, spec: str) -> str:
        """The message for another one that quotes it, with the remedies of both readers."""
        return format(_cut(super().__str__()), spec)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    @property
    def for_command(self) -> str:
        """The message as the command shows it."""
        return _shown(wording(super().__str__(), command=True))


def _shown(text: str) -> str:
    return _cut(printable(without_secrets(text)))


def _cut(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"


class DataError(CmeDaskError, ValueError):
    """Input data, a stored file or a parameter is not usable as given."""


class ZeroWeights(DataError):
    """No row has a positive weight."""

    def __init__(
        self, message: str = "all weights are zero: at least one row needs a positive weight"
    ) -> None:
        super().__init__(message)


class NonFiniteValues(DataError):
    """Rows hold NaN or infinity.

    Parameters
    ----------
    message
        The sentence.
    missing
        Whether some of the values are NaN, which fits may leave out or fill in.
    statement
        The sentence without its remedy.
    """

    def __init__(
        self,
        message: str = "values must be finite",
        missing: bool = False,
        statement: str = "values must be finite",
    ) -> None:
        super().__init__(message)
        self.missing = missing
        self.statement = statement


class StoreError(DataError):
    """A stored sample or model is missing, damaged, half-written or of a newer version."""


class NotFittedError(CmeDaskError, ValueError, AttributeError):
    """A query was made before ``fit``."""


class ResourceError(CmeDaskError, RuntimeError):
    """The machine or the cluster can't do it: memory, disk, scheduler, a missing package."""


class ConvergenceError(CmeDaskError, RuntimeError):
    """A solver missed its tolerance; nothing was fitted."""


class NumericalError(CmeDaskError, ArithmeticError):
    """Rounding has spoiled a result that no input should spoil; nothing was fitted."""


class ShardDone(CmeDaskError):
    """A shard has done its share of a pass; the fit goes on when the others have, too."""


class ConvergenceWarning(UserWarning):
    """A solver missed its tolerance, and ``convergence="warn"`` retained the solution."""


class ToleranceWarning(UserWarning):
    """The pass measured a trace error above ``tol`` over all rows."""


class RankWarning(UserWarning):
    """The numerical rank or ``max_rank`` was reached before ``tol``."""


class ConstantColumnWarning(UserWarning):
    """A column has one value in all sampled rows, and carries no information."""


class LengthScaleWarning(UserWarning):
    """A given kernel is much too short or too long for the rows."""


class UnseenCategoryWarning(UserWarning):
    """Labels that the fit has not seen are answered as its pooled rare ones."""
