"""One training a folder at a time."""

import fcntl
from pathlib import Path
from typing import IO

LOCK = "lock"


def locked(folder: Path) -> IO:
    """A file that keeps other processes' trainings out of a folder until it is closed, or its process ends.

    Raises ValueError where there is such a training.
    """
    file = (folder / LOCK).open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ValueError(f"another training runs in {folder}: wait for its end, or choose another --out") from None
    return file
