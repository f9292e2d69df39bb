"""What a round takes by its width, on this machine with this model."""

import contextlib
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

import mlx.core as mx

from specmlx.formats.cache import cache_directory

# A round that takes longer than this times what was expected tells little more than that: something else was running.
_OUTLIER = 2.0
# Of so many first rounds of a width that was never measured, the first apart, the quickest counts.
_QUICKEST = 4
# A round of w drafted tokens is held to no more than w + this times a plain one: what is wrong beyond that, by whatever
# accident, is put right by trying it.
_DEAREST = 3


class Costs:
    """Seconds of a round by width, learnt from rounds that took place.

    A width's first round isn't measured: it may have compiled kernels; of the next few the quickest counts. Speed as a
    whole, which heat, other programs and long contexts change, is followed quickly and for all widths together; how
    widths compare, slowly. No width is held to be dearer than a wider one, nor by more than its rows than a narrower
    one, so that a round in which something else was running does not rule a width out.

    survival: how often each slot survived, on average over requests; empty if that is not known.
    credit: plain rounds' worth of trying other widths that earlier requests left unspent.
    """

    def __init__(self, seconds: Mapping[int, float] | None = None, survival: Sequence[float] = (), credit: float = 0.0):
        self._shape: dict[int, float] = dict(seconds or {})
        self._from_before = frozenset(self._shape)
        self.survival = list(survival)
        self.credit = credit
        self._speed = 1.0
        self._rounds: dict[int, int] = {}
        self._clock = 0
        self._measured: dict[int, int] = {}

    def known(self, width: int) -> bool:
        """Whether a round of this width was ever measured."""
        return width in self._shape

    def begun(self, width: int) -> bool:
        """Whether this width's first round, which isn't measured, is over."""
        return self._rounds.get(width, 0) > 0

    def age(self, width: int) -> float:
        """Rounds since this width was measured; infinite where that was in an earlier request."""
        return self._clock - self._measured[width] if width in self._measured else math.inf

    def observe(self, width: int, seconds: float) -> None:
        """A round of `width` took `seconds`."""
        self._clock += 1
        n = self._rounds[width] = self._rounds.get(width, 0) + 1
        if n == 1:
            return
        self._measured[width] = self._clock
        if width not in self._shape:
            self._shape[width] = seconds / self._speed
            return
        off = math.log(seconds / (self._shape[width] * self._speed))
        # Not where it is known from before: each request's luck would make all other widths dearer for ever.
        if n <= _QUICKEST and off < 0 and width not in self._from_before:
            self._shape[width] *= math.exp(off)
            return
        off = max(-math.log(_OUTLIER), min(math.log(_OUTLIER), off))
        self._speed *= math.exp(0.2 * off)
        # The first few rounds are averaged.
        self._shape[width] *= math.exp(max(0.05, 1 / n) * (1 - 0.2) * off)

    def seconds(self, most: int) -> list[float]:
        """Seconds of a round of width 0..most; between and beyond the known ones along straight lines."""
        fitted = self._fitted()
        return [self._speed * _at(fitted, width) for width in range(most + 1)]

    def table(self) -> dict[int, float]:
        """The known widths' seconds, as `Costs` takes them."""
        return {width: self._speed * each for width, each in sorted(self._fitted().items())}

    def _fitted(self) -> dict[int, float]:
        fitted, least = {}, math.inf
        for width in sorted(self._shape, reverse=True):
            fitted[width] = least = min(least, self._shape[width])
        if 0 in fitted:
            fitted = {w: min(each, (w + _DEAREST) * fitted[0]) if w else each for w, each in fitted.items()}
        for width in sorted(fitted):
            narrower = [fitted[w] * (width + 1) / (w + 1) for w in fitted if 0 < w < width]
            fitted[width] = min([fitted[width], *narrower])
        return fitted


def _at(known: Mapping[int, float], width: int) -> float:
    if width in known:
        return known[width]
    below = max((w for w in known if w < width), default=None)
    above = min((w for w in known if w > width), default=None)
    if below is None:
        return known.get(above, 1.0)
    if above is not None:
        return known[below] + (width - below) / (above - below) * (known[above] - known[below])
    # Past the widest known: the slope of the last two, the plain pass apart, whose round drafts nothing.
    drafting = sorted(w for w in known if w)
    if len(drafting) < 2:
        return known[below]
    slope = (known[drafting[-1]] - known[drafting[-2]]) / (drafting[-1] - drafting[-2])
    return known[below] + max(0.0, slope) * (width - below)


def costs_file(*fingerprints: str) -> Path:
    """The file for these weights on this machine, device and version of mlx."""
    machine = (platform.node(), platform.machine(), str(mx.default_device()), mx.__version__)
    digest = blake2b(json.dumps([*machine, *fingerprints]).encode(), digest_size=16)
    return cache_directory() / "widths" / f"{digest.hexdigest()}.json"


def load(file: Path) -> Costs:
    """What an earlier process measured; nothing where the file is missing or is no table of seconds."""
    try:
        kept = json.loads(file.read_text())
        seconds = {int(width): float(each) for width, each in kept["seconds"].items()}
        survival = [float(chance) for chance in kept.get("survival", [])]
        credit = float(kept.get("credit", 0.0))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Costs()
    fine = all(width >= 0 and 0 < each < math.inf for width, each in seconds.items())
    fine = fine and all(0 <= chance <= 1 for chance in survival) and 0 <= credit < math.inf
    return Costs(seconds, survival, credit) if fine else Costs()


def save(file: Path, costs: Costs) -> None:
    """Keep the table for later processes, as far as the file can be written: nothing depends on it."""
    if not costs.table():
        return
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        # Whole or not at all, where two processes write it.
        new = file.with_name(f"{file.name}.{os.getpid()}")
        kept = {"seconds": costs.table(), "survival": costs.survival, "credit": costs.credit}
        new.write_text(json.dumps(kept))
        new.replace(file)
