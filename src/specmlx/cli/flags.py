"""Commands whose options are the fields of dataclasses."""

import contextlib
import json
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from inspect import cleandoc, signature
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import click

from specmlx.cli.launched import launched_rank
from specmlx.cli.terminal import answers, say
from specmlx.formats.atomic import check_folder
from specmlx.formats.values import CHECKS, check, option

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_EXAMPLES = "\b\nExamples:"
_RANGES = {int: click.IntRange, float: click.FloatRange}


def command(json_help: str | None = None) -> Callable[[type], click.Command]:
    """Make a dataclass of a class and a command of that, whose method `run` returns False for exit code 1.

    A field made by `option` or `argument` is one, of its annotation's type or one of the choices `type`. A field that
    is a dataclass stands for those of its own fields that are made so; its default has theirs. Examples come last in
    the help.

    json_help: the help of --json, for a command that prints by `report`.
    """

    def decorate(kind: type) -> click.Command:
        # A field belongs to one class, and commands share some.
        for name, field in vars(kind).copy().items():
            if isinstance(field, Field):
                setattr(kind, name, copy(field))
        kind = dataclass(frozen=True, kw_only=True)(kind)
        groups, params = {}, []
        for field in fields(kind):
            if is_dataclass(field.type):
                groups[field.name] = group = field.type() if field.default is MISSING else field.default
                params += [_parameter(own, getattr(group, own.name)) for own in _options(group)]
            else:
                params.append(_parameter(field, field.default))
        if json_help:
            keep = {"expose_value": False, "callback": lambda ctx, _, value: setattr(ctx.find_root(), "obj", value)}
            params.append(click.Option(["--json"], is_flag=True, help=json_help, **keep))

        def run(**values: Any) -> Any:
            for name, group in groups.items():
                values[name] = replace(group, **{own.name: values.pop(own.name) for own in _options(group)})
            with answers():
                return kind(**values).run()

        text, found, examples = cleandoc(kind.__doc__).partition(_EXAMPLES)
        return click.Command(kind.__name__.lower(), callback=run, params=params, help=text, epilog=found + examples)

    return decorate


def argument(**attrs: Any) -> Any:
    """A field that is an argument of a command; attrs: what click gets."""
    return option(argument=True, **attrs)


def like(kind: type, name: str, default: Any = None) -> Any:
    """An option like the field `name` of a dataclass, with its default if none is given."""
    field = kind.__dataclass_fields__[name]
    return option(field.default if default is None else default, **field.metadata)


def arguments(function: Callable, *flags: Any) -> dict[str, Any]:
    """What a function takes by the names of fields of these dataclasses."""
    names = signature(function).parameters
    return {f.name: getattr(group, f.name) for group in flags for f in fields(group) if f.name in names}


def report(found: Any, lines: Iterable[str]) -> None:
    """Print what a command has found: as one JSON object with --json, else the lines."""
    say(json.dumps(found) if as_json() else "\n".join(lines))


def as_json() -> bool:
    """Whether this run of the command line has --json."""
    return click.get_current_context().find_root().obj


def _options(group: Any) -> list[Field]:
    return [field for field in fields(group) if field.metadata]


def _parameter(field: Field, default: Any) -> click.Parameter:
    """An option or argument. Types: bool is a flag, or two; of a tuple there may be several."""
    name, attrs, args = field.name, dict(field.metadata), get_args(field.type)
    kinds = [kind for kind in args or [field.type] if kind not in (NoneType, ...)]
    names = [name, f"--{name.replace('_', '-')}", *attrs.pop("names", ())]
    several = args[1:] == (...,)
    if isinstance(attrs.get("type"), tuple):
        attrs["type"] = click.Choice(attrs["type"])
    if name in CHECKS:
        attrs = {"callback": _checked} | attrs
    if "least" in attrs:
        attrs["type"] = _RANGES[kinds[0]](min=attrs.pop("least"))
    elif kinds == [bool] and "type" not in attrs:
        attrs["is_flag"] = True
        names[1] += f"/--no-{name}" if NoneType in args or default else ""
    elif kinds == [Path]:
        attrs = {"type": click.Path(dir_okay=False, path_type=Path)} | attrs
    elif kinds in ([int], [float]):
        attrs = {"type": kinds[0]} | attrs
    if attrs.pop("argument", False):
        del attrs["help"]
        return click.Argument([name], nargs=-1 if several else 1, required=True, **attrs)
    attrs = {"show_default": default not in (None, ()) and default is not False, "multiple": several} | attrs
    return click.Option(names, default=default, **attrs)


def _checked(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """Check an option as the functions that take it do; a text that is a number becomes one."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = int(value)
    return check(param.name, value)


def written(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """A callback for a file to be written, by the first process where several run: its folder has to be there."""
    if param.name == "plot" and value is not None:
        from specmlx.evaluation.plot import check_plot

        check_plot(value)
    elif not launched_rank():
        check_folder(param.opts[-1], value)
    return value


def json_object(value: str) -> dict[str, Any]:
    """The type of an option that holds a JSON object."""
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"not JSON ({error}).") from None
    if not isinstance(parsed, dict):
        raise click.BadParameter('not a JSON object like {"name": true}.')
    return parsed
