"""Files that are there whole or not at all, whenever the writer dies."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

_CHUNK = 1 << 23


def write_atomically(
    path: Path, parts: Iterable[bytes | memoryview] | str, private: bool = False, system: ModuleType = os
) -> None:
    """Replace a file by a text or `parts`: after a crash at any moment the old one is whole, or the new one is.

    A temporary file beside it is written and synced, renamed, and the directory synced. `private`: only its owner may
    read it. `system` makes the calls, as `os` does. A link stays, and the file behind it is replaced. Raises OSError,
    with the old file as it was and nothing left over, and ValueError for a path that is no regular file.
    """
    path = path.resolve()
    _check_replaceable(path)
    # What writers of this file left that were killed.
    for partial in path.parent.glob(f".{path.name}.*.partial"):
        with contextlib.suppress(OSError, ValueError):
            try:
                os.kill(int(partial.name.split(".")[-3]), 0)
            except ProcessLookupError:
                partial.unlink(missing_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.partial")
    try:
        file = system.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
        try:
            for part in [parts.encode()] if isinstance(parts, str) else parts:
                left = memoryview(part).cast("B")
                while left:
                    left = left[system.write(file, left[:_CHUNK]) :]
            system.fsync(file)
        finally:
            system.close(file)
        system.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _sync(path.parent, system)


def _sync(path: Path, system: ModuleType = os) -> None:
    descriptor = system.open(path, os.O_RDONLY)
    try:
        system.fsync(descriptor)
    finally:
        system.close(descriptor)


@contextlib.contextmanager
def whole_directory(out: Path) -> Iterator[Path]:
    """A new directory that takes the name `out`, missing or empty, once the work in it is done and synced.

    It is removed where that fails.
    """
    out = out.absolute()
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        for file in [*partial.rglob("*"), partial]:
            _sync(file)
        partial.replace(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def check_folder(flag: str, path: Path | None) -> None:
    """Raises ValueError where a file to be written, the value of a `flag`, has no folder or is no regular file."""
    if path is not None:
        if not path.absolute().parent.is_dir():
            raise ValueError(f"{flag} {path}: there is no directory {path.parent}")
        _check_replaceable(path)


def _check_replaceable(path: Path) -> None:
    """Raises ValueError for a device, a FIFO or a directory, which a renamed file would take the place of."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a regular file: name a file that can be replaced")
