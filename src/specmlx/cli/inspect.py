"""`specmlx inspect`: what a checkpoint is, by its headers."""

import json
from pathlib import Path

import click

from specmlx.cli.terminal import answers, say


@click.command(short_help="Say what a checkpoint is.")
@click.argument("path", metavar="PATH_OR_ID")
@click.option("--revision", metavar="NAME", help="Branch, tag or commit of a Hub id.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def inspect(path: str, revision: str | None, as_json: bool) -> None:
    """What a model or drafter is: kind, packaging, sizes, bytes, and what its files leave open.

    Only config.json and the headers of the files are read: of a Hub id that is not in the local cache, without
    downloading a weight.
    """
    from specmlx.loading.hub import download, is_id, remote_repo
    from specmlx.loading.inspect import inspect_path, inspect_tensors
    from specmlx.loading.resolve import resolve

    with answers() as out:
        if not is_id(path):
            found = inspect_path(resolve(path))
        else:
            try:
                found = inspect_path(download(path, revision, local_only=True))
            except ValueError:
                repo = remote_repo(path, revision)
                found = inspect_tensors(path, repo.config, repo.tensors, repo.files)
    if as_json:
        say(json.dumps(found.as_dict()), out)
        return
    say(f"{Path(found.path) if not is_id(path) else path}: {found.what}, {found.kind} ({found.packaging})", out)
    for name, value in found.geometry.items():
        say(f"  {name}: {value}", out)
    say(f"  {found.tensors} tensors in {found.files} files, {_size(found.bytes)}:", out)
    for name, group in found.groups.items():
        say(f"    {name:<20} {group.tensors:>6} tensors  {_size(group.bytes):>10}", out)
    say(f"  read by a pass over one row: {_size(found.bytes_per_pass)}", out)
    for question in found.questions:
        say(f"  open: {question}", out)


def _size(nbytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} B"
