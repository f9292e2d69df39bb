"""Answers go to stdout and everything else to stderr."""

import contextlib
import sys
from collections.abc import Iterator
from typing import TextIO

import click


@contextlib.contextmanager
def answers() -> Iterator[TextIO]:
    """The real stdout, while what libraries print (mlx-lm's memory warning, for one) goes to stderr."""
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        yield out


def note(text: str) -> None:
    """A line on stderr."""
    click.echo(text, err=True)


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
        click.echo(f"\r\x1b[K{text}", nl=False, err=True)


def prefill_status(processed: int, total: int) -> None:
    """A `prompt_progress_callback`; the status is gone when the prompt is in."""
    show_status(f"prompt: {processed} of {total} tokens" if processed < total else "")
