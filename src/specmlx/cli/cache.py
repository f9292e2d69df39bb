"""`specmlx cache`: the files that keep prompts and conversations."""

from collections.abc import Iterator
from pathlib import Path

import click

from specmlx.cli.flags import argument, command
from specmlx.cli.tables import count
from specmlx.cli.terminal import note, say

PATHS = argument(type=click.Path(exists=True, path_type=Path))


@command()
class List:
    """What is in the files PATHS, or in the files in directories PATHS: a line a snapshot, longest first."""

    paths: tuple[Path, ...] = PATHS

    def run(self) -> None:
        from specmlx.cache.files import load_prompts

        for path in _files(self.paths):
            held, metadata = load_prompts(path)
            model = metadata.get("model", "a model without a name")
            say(f"{path}: {count(len(held), 'snapshot')} of {model}, {path.stat().st_size / 1e6:.1f} MB")
            for namespace, snapshot, _ in sorted(held, key=lambda found: -found[1].length):
                say(f"  {snapshot.length} tokens, {count(len(snapshot.drafts), 'drafter')}, model {namespace[:8]}")


@command()
class Clear:
    """Delete the files PATHS, or the files in directories PATHS, that hold prompts; no other file is touched."""

    paths: tuple[Path, ...] = PATHS

    def run(self) -> None:
        files = [*_files(self.paths)]
        for path in files:
            path.unlink()
            note(f"{path} deleted.")
        if not files:
            note("Nothing to delete.")


@click.group("cache", commands=[List, Clear], invoke_without_command=True)
@click.pass_context
def Cache(ctx: click.Context) -> None:
    """List or clear files that `specmlx chat --prompt-cache-file` or `PromptCache.save` wrote."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def _files(paths: tuple[Path, ...]) -> Iterator[Path]:
    """The files of prompts among the paths and in directories among them. Raises ValueError for another file."""
    from specmlx.cache.files import holds_prompts

    for path in paths:
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            if file.is_file() and holds_prompts(file):
                yield file
            elif not path.is_dir():
                raise ValueError(f"{file} holds no prompts: it was not written by specmlx chat or PromptCache.save")
