"""Answers go to stdout and everything else to stderr; a terminal is given no command that a model or a file wrote."""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import TextIO

import click

from specmlx.formats.printable import printable

_STDOUT: ContextVar[TextIO | None] = ContextVar("stdout", default=None)


@contextlib.contextmanager
def answers() -> Iterator[None]:
    """Only `say` writes to stdout; what libraries print (mlx-lm's memory warning, for one) goes to stderr."""
    token = _STDOUT.set(sys.stdout)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _STDOUT.reset(token)


def stdout() -> TextIO:
    """Where answers go."""
    return _STDOUT.get() or sys.stdout


def say(text: str = "", out: TextIO | None = None, *, nl: bool = True, fg: str | None = None) -> None:
    """Write text to a stream (default: where answers go), see `printable`; `fg`: in a colour, on any stream."""
    out = out or stdout()
    # color: click would take sequences out of what goes into a pipe.
    text = printable(text, out)
    click.echo(click.style(text, fg=fg) if fg and text else text, file=out, nl=nl, color=True)


def note(text: str, fg: str | None = None) -> None:
    """A line on stderr; on a terminal in a colour."""
    say(text, sys.stderr, fg=fg if sys.stderr.isatty() else None)


@contextlib.contextmanager
def status(text: str) -> Iterator[None]:
    """Show what is going on while it lasts, on terminals only: it leaves nothing behind."""
    show_status(text)
    try:
        yield
    finally:
        show_status("")


def show_status(text: str) -> None:
    """Replace the status line; "" clears it."""
    if sys.stderr.isatty():
        click.echo(f"\r\x1b[K{printable(text, sys.stderr)}", nl=False, err=True)


def prefill_status(processed: int, total: int) -> None:
    """A `prompt_progress_callback`; the status is gone when the prompt is in."""
    show_status(f"prompt: {processed} of {total} tokens" if processed < total else "")


@contextlib.contextmanager
def handled(signals: Sequence[int], handler: Callable) -> Iterator[None]:
    """Handle these signals by `handler` while it lasts."""
    before = {signum: signal.signal(signum, handler) for signum in signals}
    try:
        yield
    finally:
        for signum, old in before.items():
            signal.signal(signum, old)
