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

# The commands with what they do in short, so that `specmlx --help` imports none of them.
_COMMANDS = {
    "generate": "Answer one prompt.",
    "chat": "Talk with a model.",
    "models": "List known targets and drafters.",
    "inspect": "Say what a checkpoint is.",
    "convert": "Write a target and its drafter to one directory.",
    "cache": "List or clear files of prompt caches.",
    "parity": "Check that a drafter changes no token.",
    "bench": "Measure plain and speculative decoding by turns.",
    "train": "Train a drafter for a model.",
    "evaluate": "Measure a drafter on prompts of your own.",
    "roofline": "Bytes of a round, and the fastest that a bandwidth allows.",
    "kernels": "Which kernel serves which shape on this machine.",
    "doctor": "What this machine is, and whether specmlx works on it.",
    "view": "A trace of generate --trace as a page.",
    "demo-export": "Write the demo pair as a model directory.",
}
# What several processes do together, under mlx.launch.
_TOGETHER = "generate"
# Seconds that a silent process leaves the first one to say what is wrong.
SILENCE = 1.0


class Commands(click.Group):
    """A group that imports a subcommand when it is named, and reports errors in one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = import_module(f"specmlx.cli.{cmd_name.replace('-', '_')}")
        return getattr(module, cmd_name.title().replace("-", ""))

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if near := [] if args[0] in _COMMANDS else get_close_matches(args[0], _COMMANDS, 1):
            raise click.UsageError(f"no such command: {args[0]}; did you mean {near[0]}?")
        found = super().resolve_command(ctx, args)
        if found[0] != _TOGETHER and join() is not None:
            raise click.UsageError(f"{found[0]} runs in one process: under mlx.launch there is specmlx {_TOGETHER}")
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
            if super().invoke(ctx) is False:
                ctx.exit(1)


@contextlib.contextmanager
def _one_line(as_json: bool) -> Iterator[None]:
    """Anything that the user can put right is one line on stderr and exit code 2."""
    try:
        yield
    # click's own ways to end are RuntimeErrors too.
    except (click.exceptions.Exit, click.Abort):
        raise
    except KeyboardInterrupt:
        raise click.exceptions.Exit(130) from None
    except (click.ClickException, ValueError, OSError, RuntimeError) as error:
        if isinstance(error, OSError) and error.errno == errno.EPIPE:
            raise
        said = error.format_message() if isinstance(error, click.ClickException) else str(error)
        said = " ".join(said.split()) or "unknown error"
        # Of several processes the first one speaks; mlx.launch ends them all once one has ended.
        if launched_rank():
            time.sleep(SILENCE)
        else:
            if as_json:
                say(json.dumps({"error": said}))
            note(f"Error: {said}")
        raise click.exceptions.Exit(2) from error


@click.group(cls=Commands, invoke_without_command=True)
@click.version_option(__version__)
@click.pass_context
def main(ctx: click.Context) -> None:
    """Speculative decoding for hybrid Gated DeltaNet models: the target's own text in fewer passes."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
