"""`specmlx cache`: the files that keep prompts and conversations."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from specmlx.cli.terminal import note, say

paths_argument = click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))


@click.group(short_help="List or clear files of prompt caches.")
def cache() -> None:
    """List or clear files that `specmlx chat --prompt-cache-file` or `PromptCache.save` wrote."""


@cache.command("list")
@paths_argument
def list_(paths: tuple[Path, ...]) -> None:
    """What is in the files PATHS, or in the files in directories PATHS: a line a snapshot, longest first."""
    from specmlx.cache.files import load_prompts

    for path in _files(paths):
        held, metadata = load_prompts(path)
        model = metadata.get("model", "a model without a name")
        say(f"{path}: {_count(held, 'snapshot')} of {model}, {path.stat().st_size / 1e6:.1f} MB")
        for namespace, snapshot, _ in sorted(held, key=lambda found: -found[1].length):
            drafts = _count(snapshot.drafts, "drafter")
            say(f"  {snapshot.length} tokens, {drafts}, model {namespace[:8]}")


@cache.command()
@paths_argument
def clear(paths: tuple[Path, ...]) -> None:
    """Delete the files PATHS, or the files in directories PATHS, that hold prompts; no other file is touched."""
    files = [*_files(paths)]
    for path in files:
        path.unlink()
        note(f"{path} deleted.")
    if not files:
        note("Nothing to delete.")


def _files(paths: tuple[Path, ...]) -> Iterator[Path]:
    """The files of prompts among the paths and in directories among them. Raises ValueError for another file."""
    from specmlx.cache.files import holds_prompts

    for path in paths:
        ours = [file for file in sorted(path.iterdir()) if file.is_file()] if path.is_dir() else [path]
        for file in ours:
            if holds_prompts(file):
                yield file
            elif not path.is_dir():
                raise ValueError(f"{file} holds no prompts: it was not written by specmlx chat or PromptCache.save")


def _count(things: Any, noun: str) -> str:
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"
