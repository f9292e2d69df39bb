"""Where what was measured on this machine is kept."""

import os
import sys
from pathlib import Path


def cache_directory() -> Path:
    """$SPECMLX_CACHE, else specmlx in $XDG_CACHE_HOME or the system's place for caches; it can be deleted."""
    if own := os.environ.get("SPECMLX_CACHE"):
        return Path(own)
    usual = "Library/Caches" if sys.platform == "darwin" else ".cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / usual) / "specmlx"
