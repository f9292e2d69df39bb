"""How flags become values: several of them one value of a command, and those that hold JSON."""

import functools
import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import click


def grouped(name: str, kind: type, *options: Callable) -> Callable:
    """A decorator that gives a command the options, and their values as one argument `name` of the dataclass `kind`."""

    def decorate(command: Callable) -> Callable:
        @functools.wraps(command)
        def call(**flags: Any) -> Any:
            own = {field.name: flags.pop(field.name) for field in fields(kind)}
            return command(**flags, **{name: kind(**own)})

        for option in reversed(options):
            call = option(call)
        return call

    return decorate


def json_object(ctx: click.Context, param: click.Parameter, value: str | None) -> dict[str, Any] | None:
    if value is None:
        return None
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"not JSON ({error}).") from None
    if not isinstance(parsed, dict):
        raise click.BadParameter('not a JSON object like {"name": true}.')
    return parsed
