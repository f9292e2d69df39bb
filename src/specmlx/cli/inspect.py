"""`specmlx inspect`: what a checkpoint is, by its headers."""

from collections.abc import Iterator
from typing import Any

from specmlx.cli.flags import argument, command, report
from specmlx.formats.values import option


@command("Print one JSON object instead of a table.")
class Inspect:
    """What a model or drafter is: kind, packaging, sizes, bytes, and what its files leave open.

    Only config.json and the headers of the files are read: of a Hub id that is not in the local cache, without
    downloading a weight.
    """

    path: str = argument(metavar="PATH_OR_ID")
    revision: str | None = option(None, "Branch, tag or commit of a Hub id.", metavar="NAME")

    def run(self) -> None:
        from specmlx.loading.hub import download, is_id, remote_repo
        from specmlx.loading.inspect import inspect_path, inspect_tensors
        from specmlx.loading.resolve import resolve

        if not is_id(self.path):
            found = inspect_path(resolve(self.path))
        else:
            try:
                found = inspect_path(download(self.path, self.revision, local_only=True))
            except ValueError:
                found = inspect_tensors(self.path, *remote_repo(self.path, self.revision))
        report(found.as_dict(), _lines(found, self.path if is_id(self.path) else found.path))


def _lines(found: Any, name: str) -> Iterator[str]:
    yield f"{name}: {found.what}, {found.kind} ({found.packaging})"
    for key, value in found.geometry.items():
        yield f"  {key}: {value}"
    yield f"  {found.tensors} tensors in {found.files} files, {_size(found.bytes)}:"
    for key, group in found.groups.items():
        yield f"    {key:<20} {group.tensors:>6} tensors  {_size(group.bytes):>10}"
    yield f"  read by a pass over one row: {_size(found.bytes_per_pass)}"
    for question in found.questions:
        yield f"  open: {question}"


def _size(nbytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} B"
