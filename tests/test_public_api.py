"""The public interface, name by name, beside a snapshot of it.

A test that fails here says that a user's code may have to change. Where the change is meant, renew
the snapshot with ``python -m tests.test_public_api`` and name the change in the changelog.
"""

import dataclasses
import difflib
import inspect
import re
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path

import click

import cme_dask
from cme_dask.cli import cli

SNAPSHOT = Path(__file__).with_name("public_api.txt")
RENEW = "python -m tests.test_public_api"


def is_ours(value):
    return str(getattr(value, "__module__", "")).split(".")[0] == "cme_dask"


def signature(function):
    """Names, kinds and defaults; annotations name modules, which may move."""
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError):
        return "(...)"
    bare = [p.replace(annotation=p.empty) for p in found.parameters.values()]
    text = str(inspect.Signature(bare))
    return re.sub(r"<(class|function) '?(?:\w+\.)*(\w+).*?>", r"\2", text)


def documented(kind):
    """Name and type of each attribute in the section Attributes of a class."""
    section = (inspect.getdoc(kind) or "").partition("Attributes\n----------\n")[2]
    section = re.split(r"\n\n\w[^\n]*\n-{3,}\n", section)[0]
    for line in section.splitlines():
        if re.match(r"\w+(, \w+)*( :.*)?$", line):
            names, _, text = line.partition(" : ")
            for name in names.split(", "):
                yield name, text


def attributes(kind):
    """Names of fields, methods, properties and documented attributes, inherited ones too."""
    ours = [base for base in kind.__mro__ if is_ours(base)]
    names = {key for base in ours for key in vars(base)}
    names |= {name for base in ours for name, _ in documented(base)}
    names |= {f.name for f in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    return sorted(key for key in names if not re.match("_|set_.*_request", key))


def described_class(name, kind, made_by_users=True):
    """A class: its parameters, its parents, its public attributes and methods."""
    parents = [base.__name__ for base in kind.__mro__[1:] if base.__name__ in PUBLIC_PARENTS]
    below = f": {', '.join(parents)}" if parents else ""
    yield f"class {name}{signature(kind) if made_by_users else ''}{below}"
    for key in attributes(kind):
        value = inspect.getattr_static(kind, key, None)
        function = getattr(value, "__func__", value)
        yield f"    {key}{signature(function) if inspect.isfunction(function) else ''}"


PUBLIC_PARENTS = {
    *("BaseEstimator", "ClassifierMixin", "RegressorMixin", "TransformerMixin", "Sequence"),
    *("Constraint", "Kernel", "CmeDaskError", "DataError", "UserWarning", "ValueError"),
    *("RuntimeError", "ArithmeticError", "AttributeError"),
}


def described(name, value):
    if inspect.isclass(value):
        yield from described_class(name, value)
    elif callable(value):
        yield f"{name}{signature(value)}"
    else:
        yield f"{name}: {type(value).__name__}"


def named(module):
    """Public names of a module: ``__all__``, or what it defines itself."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    own = (
        key
        for key, value in vars(module).items()
        if not key.startswith("_")
        and ((is_ours(value) and value.__module__ == module.__name__) or key.isupper())
    )
    return sorted(own)


def classes_of(annotation):
    """Our classes in an annotation, ``X | None`` and ``tuple[X, ...]`` too."""
    if inspect.isclass(annotation) and is_ours(annotation):
        yield annotation
    for part in typing.get_args(annotation):
        yield from classes_of(part)


def members(kind):
    """Functions, also those behind properties, that a class of ours or its parents define."""
    for base in filter(is_ours, kind.__mro__):
        for key, value in vars(base).items():
            if not key.startswith("_"):
                yield getattr(value, "fget", getattr(value, "__func__", value))


def returned(values):
    """Our classes without a public name that public functions, methods and attributes give."""
    loaded = [vars(module) for key, module in sys.modules.items() if key.startswith("cme_dask.")]
    for value in values:
        for function in members(value) if inspect.isclass(value) else [value]:
            if inspect.isfunction(function):
                yield from classes_of(inspect.unwrap(function).__annotations__.get("return"))
        for _, text in documented(value) if inspect.isclass(value) else ():
            for name in re.findall(r"\w+", text):
                yield from {m[name] for m in loaded if inspect.isclass(m.get(name))}


def commands(command, name) -> Iterator[str]:
    """A command with its arguments and options, and the commands below it."""
    yield name
    for parameter in command.params:
        shown = ", ".join([*parameter.opts, *parameter.secondary_opts])
        needed = " (required)" if parameter.required else ""
        yield f"    {shown}: {parameter.type.name}{needed}"
    if isinstance(command, click.Group):
        for key in sorted(command.commands):
            yield from commands(command.commands[key], f"{name} {key}")


def snapshot():
    """The public interface as lines of text."""
    lines, seen = [], []
    modules = {name: getattr(cme_dask, name) for name in cme_dask._MODULES}
    names = {name: getattr(cme_dask, name) for name in sorted(cme_dask.__all__)}
    names = {key: value for key, value in names.items() if not isinstance(value, types.ModuleType)}
    sections = {"cme_dask": names}
    for name, module in modules.items():
        sections[f"cme_dask.{name}"] = {key: getattr(module, key) for key in named(module)}
    for title, members in sections.items():
        lines += ["", f"# {title}"]
        for name, value in members.items():
            lines += described(name, value)
            seen.append(value)
    lines += ["", "# returned by them"]
    known = {id(value) for value in seen}
    others = {kind.__name__: kind for kind in returned(seen) if id(kind) not in known}
    for name, kind in sorted(others.items()):
        if not name.startswith("_"):
            lines += described_class(name, kind, made_by_users=False)
    lines += ["", "# commands", *commands(cli, "cme-dask")]
    return "\n".join(lines).strip() + "\n"


def test_the_public_interface_is_that_of_the_snapshot():
    before, now = SNAPSHOT.read_text().splitlines(), snapshot().splitlines()
    changes = list(difflib.unified_diff(before, now, "snapshot", "now", n=1))
    assert not changes, "\n".join([*changes, f"If this is meant: {RENEW}, and the changelog."])


if __name__ == "__main__":
    SNAPSHOT.write_text(snapshot())
    sys.stdout.write(f"{SNAPSHOT}\n")
