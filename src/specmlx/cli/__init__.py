"""The `specmlx` command. Each subcommand is a file of its own that imports mlx only when it runs."""

import contextlib
import errno
import json
import time
import warnings
from collections.abc import Iterator
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import click

from specmlx import __version__
from specmlx.cli.launched import join, launched_rank
from specmlx.cli.terminal import note, say

_COMMANDS = (
    "generate",
    "chat",
    "models",
    "inspect",
    "convert",
    "cache",
    "parity",
    "bench",
    "train",
    "evaluate",
    "roofline",
    "kernels",
    "doctor",
    "view",
    "demo-export",
)


# What several processes do together, under mlx.launch.
_TOGETHER = "generate"
# Seconds that a silent process leaves the first one to say what is wrong.
SILENCE = 1.0


class Failure(click.ClickException):
    """Anything that the user can put right: one line on stderr, exit code 2."""

    exit_code = 2

    def __init__(self, message: str, as_json: bool = False):
        super().__init__(message)
        self.as_json = as_json

    def format_message(self) -> str:
        return " ".join(self.message.split()) or "unknown error"

    def show(self, file: Any = None) -> None:
        # Of several processes the first one speaks; mlx.launch ends them all once one has ended.
        if launched_rank():
            time.sleep(SILENCE)
        else:
            if self.as_json:
                say(json.dumps({"error": self.format_message()}))
            note(f"Error: {self.format_message()}")


class Commands(click.Group):
    """A group that imports a subcommand when it is named, and reports errors in one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        name = cmd_name.replace("-", "_")
        return getattr(import_module(f"specmlx.cli.{name}"), name)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if near := [] if args[0] in _COMMANDS else get_close_matches(args[0], _COMMANDS, 1):
            raise Failure(f"no such command: {args[0]}; did you mean {near[0]}?")
        found = super().resolve_command(ctx, args)
        if found[0] != _TOGETHER and join() is not None:
            raise Failure(f"{found[0]} runs in one process: under mlx.launch there is specmlx {_TOGETHER}")
        return found

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **kwargs: Any) -> click.Context:
        as_json = "--json" in args
        with _one_line(as_json):
            ctx = super().make_context(info_name, args, *rest, **kwargs)
            # Known before the subcommand's flags are read, which may be what is wrong.
            ctx.obj = as_json
            return ctx

    def invoke(self, ctx: click.Context) -> Any:
        with _one_line(ctx.obj), warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: note(f"Warning: {message}")
            return super().invoke(ctx)


@contextlib.contextmanager
def _one_line(as_json: bool) -> Iterator[None]:
    try:
        yield
    # click's own ways to end are RuntimeErrors too.
    except (click.exceptions.Exit, click.Abort):
        raise
    except click.ClickException as error:
        raise Failure(error.format_message(), as_json) from None
    except KeyboardInterrupt:
        raise click.exceptions.Exit(130) from None
    except (ValueError, OSError, RuntimeError) as error:
        if isinstance(error, OSError) and error.errno == errno.EPIPE:
            raise
        raise Failure(str(error), as_json) from error


@click.group(cls=Commands, invoke_without_command=True)
@click.version_option(__version__)
@click.pass_context
def main(ctx: click.Context) -> None:
    """Speculative decoding for hybrid Gated DeltaNet models: the target's own text in fewer passes."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
