"""Options of the command line, made from the fields of dataclasses."""

import contextlib
import functools
import json
from collections.abc import Callable
from dataclasses import Field, fields
from typing import Any, get_args

import click

from specmlx.formats.values import CHECKS, check


def grouped(name: str, kind: type, **defaults: Any) -> Callable:
    """A decorator that gives a command an option for each field of the dataclass `kind` made by `values.option`.

    Their values become one argument `name` of that kind. defaults: other defaults than the dataclass's.
    """

    def decorate(command: Callable) -> Callable:
        @functools.wraps(command)
        def call(**flags: Any) -> Any:
            own = {field.name: flags.pop(field.name) for field in fields(kind) if field.metadata}
            return command(**flags, **{name: kind(**own)})

        return options_of(kind, **defaults)(call)

    return decorate


def options_of(kind: type, *names: str, **defaults: Any) -> Callable:
    """A decorator that gives a command an option, an argument each, for fields of `kind`: those named, or all."""
    chosen = [field for field in fields(kind) if field.metadata and (not names or field.name in names)]

    def decorate(command: Callable) -> Callable:
        for field in chosen[::-1]:
            command = _option(field, defaults.get(field.name, field.default))(command)
        return command

    return decorate


def _option(field: Field, default: Any) -> Callable:
    attrs = dict(field.metadata)
    names = (f"--{field.name.replace('_', '-')}", *attrs.pop("names", ()))
    kind = next((part for part in get_args(field.type) if part in (int, float)), field.type)
    if field.name in CHECKS:
        attrs = {"callback": checked} | attrs
    if kind is bool:
        attrs |= {"is_flag": True}
        names = (f"{names[0]}/--no-{names[0][2:]}",) if default else names
    elif "least" in attrs:
        attrs["type"] = {int: click.IntRange, float: click.FloatRange}[kind](min=attrs.pop("least"))
    elif kind in (int, float) and str not in get_args(field.type):
        attrs = {"type": kind} | attrs
    return click.option(*names, default=default, show_default=not (default is None or default is False), **attrs)


def checked(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """A callback that checks an option as the functions that take it do; a text that is a number becomes one."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = int(value)
    return check(param.name, value)


def json_object(ctx: click.Context, param: click.Parameter, value: str | None) -> dict[str, Any] | None:
    """A callback for an option that holds a JSON object."""
    if value is None:
        return None
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"not JSON ({error}).") from None
    if not isinstance(parsed, dict):
        raise click.BadParameter('not a JSON object like {"name": true}.')
    return parsed
