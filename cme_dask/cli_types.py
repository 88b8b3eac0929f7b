"""Values of options: counts, column names, pairs, ridges."""

from typing import Any

import click


class Rows(click.ParamType):
    """A count such as 10000000, 10_000_000, 1e7 or 10M."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value).strip()
        factor = {"k": 10**3, "M": 10**6, "G": 10**9}.get(text[-1:], 1)
        try:
            count = float(text[:-1] if factor > 1 else text) * factor
            exact = int(count)
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is no count: expected for example 10000000, 1e7 or 10M", param)
        if exact != count or exact < 1:
            self.fail(f"{value!r} is no whole number of at least 1", param)
        return exact


class Names(click.ParamType):
    """Column names, separated by commas."""

    name = "columns"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        return tuple(name.strip() for name in value.split(",") if name.strip())


class Pair(click.ParamType):
    """COLUMN=TEXT."""

    name = "column=text"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        name, equals, text = value.partition("=")
        if not (name and equals and text):
            self.fail(f"{value!r} does not read COLUMN=TEXT", param)
        return name, text


class Ridge(click.ParamType):
    """R or RY,RX."""

    name = "r"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            parts = [float(part) for part in str(value).split(",")]
        except ValueError:
            parts = []
        if len(parts) not in (1, 2):
            self.fail(f"{value!r} is neither a number nor a pair rY,rX", param)
        return parts[0] if len(parts) == 1 else tuple(parts)
