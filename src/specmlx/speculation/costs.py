"""What a round takes by its width, on this machine with this model."""

import contextlib
import json
import math
import os
import platform
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

import mlx.core as mx

from specmlx.formats.cache import cache_directory

# A round that takes longer than this times what was expected tells little more than that: something else was running.
_OUTLIER = 2.0


class Costs:
    """Seconds of a round by width, learnt from rounds that took place.

    A width's first round isn't measured: it may have compiled kernels. Speed as a whole, which heat, other programs and
    long contexts change, is followed quickly and for all widths together; how widths compare, slowly.
    """

    def __init__(self, seconds: Mapping[int, float] | None = None):
        self._shape: dict[int, float] = dict(seconds or {})
        self._speed = 1.0
        self._rounds: dict[int, int] = {}

    def known(self, width: int) -> bool:
        """Whether a round of this width was measured."""
        return width in self._shape

    def begun(self, width: int) -> bool:
        """Whether this width's first round, which isn't measured, is over."""
        return self._rounds.get(width, 0) > 0

    def observe(self, width: int, seconds: float) -> None:
        """A round of `width` took `seconds`."""
        n = self._rounds[width] = self._rounds.get(width, 0) + 1
        if n == 1:
            return
        if width not in self._shape:
            self._shape[width] = seconds / self._speed
            return
        off = math.log(seconds / (self._shape[width] * self._speed))
        off = max(-math.log(_OUTLIER), min(math.log(_OUTLIER), off))
        self._speed *= math.exp(0.2 * off)
        # The first few rounds are averaged.
        self._shape[width] *= math.exp(max(0.05, 1 / n) * (1 - 0.2) * off)

    def seconds(self, most: int) -> list[float]:
        """Seconds of a round of width 0..most; between and beyond the known ones along straight lines."""
        return [self._speed * self._at(width) for width in range(most + 1)]

    def table(self) -> dict[int, float]:
        """The known widths' seconds, as `Costs` takes them."""
        return {width: self._speed * each for width, each in sorted(self._shape.items())}

    def _at(self, width: int) -> float:
        if width in self._shape:
            return self._shape[width]
        below = max((w for w in self._shape if w < width), default=None)
        above = min((w for w in self._shape if w > width), default=None)
        if below is None:
            return self._shape.get(above, 1.0)
        if above is not None:
            share = (width - below) / (above - below)
            return self._shape[below] + share * (self._shape[above] - self._shape[below])
        # Past the widest known: the slope of the last two, the plain pass apart, whose round drafts nothing.
        known = sorted(w for w in self._shape if w)
        if len(known) < 2:
            return self._shape[below]
        slope = (self._shape[known[-1]] - self._shape[known[-2]]) / (known[-1] - known[-2])
        return self._shape[below] + max(0.0, slope) * (width - below)


def costs_file(*fingerprints: str) -> Path:
    """The file for these weights on this machine, device and version of mlx."""
    machine = (platform.node(), platform.machine(), str(mx.default_device()), mx.__version__)
    digest = blake2b(json.dumps([*machine, *fingerprints]).encode(), digest_size=16)
    return cache_directory() / "widths" / f"{digest.hexdigest()}.json"


def load(file: Path) -> Costs:
    """What an earlier process measured; nothing where the file is missing or is no table of seconds."""
    try:
        seconds = {int(width): float(each) for width, each in json.loads(file.read_text())["seconds"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Costs()
    fine = all(width >= 0 and 0 < each < math.inf for width, each in seconds.items())
    return Costs(seconds) if fine else Costs()


def save(file: Path, costs: Costs) -> None:
    """Keep the table for later processes, as far as the file can be written: nothing depends on it."""
    if not costs.table():
        return
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        # Whole or not at all, where two processes write it.
        new = file.with_name(f"{file.name}.{os.getpid()}")
        new.write_text(json.dumps({"seconds": costs.table()}))
        new.replace(file)
