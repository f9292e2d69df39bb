"""What a round takes by its width, on this machine with this model."""

import contextlib
import json
import math
import os
import platform
import threading
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

import mlx.core as mx
import numpy as np

from specmlx.formats.cache import cache_directory
from specmlx.kernels.dispatch import metal_factory

# Standard deviations of logarithms of seconds.
# Of one round, until rounds have told it; at least and at most.
_ROUND, _LEAST, _MOST = 0.12, 0.05, 0.6
# Of the machine's speed from one request to another, and from one round to the next.
_REQUEST, _DRIFT = 2.0, 0.03
# Of a width measured once, of one from a table that doesn't say; what it grows by with each round, and how far.
_ONCE, _KNOWN, _AGING, _OLDEST = 0.3, 0.2, 0.004, 0.4
# For how many rounds one that stands for others as well lets them grow, at most: plain ones are seldom measured.
_AGED = 2
# A round is off by chance up to so many deviations, which the last so many rounds tell.
_LIMIT, _LAST = 2.0, 16
# What a kept table may hold; anything else was damaged: least and most seconds, the widest width, bytes.
_QUICKEST, _SLOWEST, _WIDEST, _LONGEST = 1e-9, 1e9, 255, 1 << 16
# A round of w drafted tokens is held to no more than w + this times a plain one: what is wrong beyond that, by whatever
# accident, is put right by trying it.
_DEAREST = 3


class Costs:
    """Seconds of a round by width, learnt from rounds that took place.

    A round's logarithm is the machine's speed now, which heat, other programs and long contexts change, and the
    width's own, which stays: both are followed by a Kalman filter (Kalman 1960), so that a request whose rounds all
    have one width tells how fast the machine is, and nothing of the other widths. A round can be slow by accident, not
    quick: what is too slow counts as far as chance goes, what is too quick shows that something was held wrongly.
    An unknown width's first round isn't measured: it may have compiled kernels. No width is held to be dearer than a
    wider one, nor by more than its rows than a narrower one.

    survival: how often each slot survived, on average over requests; empty if that is not known.
    credit: plain rounds' worth of trying other widths that earlier requests left unspent; below 0, took in advance.
    since_plain: rounds since a plain one, those of earlier requests too.
    """

    def __init__(
        self,
        seconds: Mapping[int, float] | None = None,
        survival: Sequence[float] = (),
        credit: float = 0.0,
        since_plain: int = 0,
        doubts: Mapping[int, float] | None = None,
    ):
        """doubts: standard deviations of the logarithms of `seconds`."""
        self.survival = list(survival)
        self.credit = credit
        self.since_plain = since_plain
        self._widths = sorted(seconds or {})
        # The machine's speed, then the widths in the order in which they became known.
        self._mean = np.array([0.0, *(math.log(seconds[width]) for width in self._widths)])
        known = [(doubts or {}).get(width, _KNOWN) for width in self._widths]
        self._variance = np.diag([_REQUEST**2, *(doubt**2 for doubt in known)])
        self._round = _ROUND
        self._table: dict[int, float] | None = None
        self._begun: set[int] = set()
        self._seen: set[int] = set()

    def known(self, width: int) -> bool:
        """Whether a round of this width was ever measured."""
        return width in self._widths

    def begun(self, width: int) -> bool:
        """Whether this width's first round, which isn't measured, is over."""
        return width in self._begun or self.known(width)

    def observe(self, width: int, seconds: float, rounds: int = 1) -> None:
        """A round of `width` took `seconds`; it is the last of so many, of which the others weren't measured."""
        if not self.begun(width):
            self._begun.add(width)
            return
        variance = self._variance
        self._table = None
        variance[0, 0] += _DRIFT**2
        own = np.einsum("ii->i", variance)[1:]
        own[own < _OLDEST**2] += min(rounds, _AGED) * _AGING**2
        if width not in self._widths:
            self._add(width, seconds)
            return
        self._follow(width, math.log(seconds))

    def _add(self, width: int, seconds: float) -> None:
        """A width that was never measured, now known by one round alone."""
        if not self._widths:
            # Speed is told in terms of this request's.
            self._variance[0, 0] = 0.0
        self._widths.append(width)
        self._mean = np.append(self._mean, math.log(seconds) - self._mean[0])
        grown = np.pad(self._variance, (0, 1))
        # It is as far off as speed is, the other way.
        grown[-1, :-1] = grown[:-1, -1] = -self._variance[0]
        grown[-1, -1] = self._variance[0, 0] + _ONCE**2
        self._variance = grown

    def _follow(self, width: int, found: float) -> None:
        index, noise = 1 + self._widths.index(width), self._round**2
        variance, off = self._variance, found - self._mean[0] - self._mean[index]
        alone = self._seen <= {width}
        chance = variance[0, 0] + variance[index, index] + 2 * variance[0, index]
        limit = _LIMIT * math.sqrt(chance + noise)
        # What is left once the means have moved; 1.25 times the mean size of a normal variable is its deviation.
        left = 1.25 * min(abs(off), limit) * math.sqrt(noise / (chance + noise))
        self._round += (min(max(left, _LEAST), _MOST) - self._round) / _LAST
        if off > limit:
            # The farther, the less it says.
            off = limit * limit / off
        elif off < -limit:
            # A width was wrongly held to be dear, where others have told how fast the machine is; or it is faster now.
            wrong = 0 if alone or width in self._seen else index
            variance[wrong, wrong] += (off / _LIMIT) ** 2
            chance += (off / _LIMIT) ** 2
        self._seen.add(width)
        toward = variance[0] + variance[index]
        gain = toward / (chance + noise)
        if alone:
            # There is nothing that it could be compared with (a Schmidt-Kalman filter: its doubt counts all the same).
            gain[1:] = 0
        self._mean = self._mean + gain * off
        # P - K hP - (K hP)' + K (hPh + r) K', in one product less.
        both = gain[:, None] * (toward - 0.5 * (chance + noise) * gain)
        self._variance = variance - both - both.T

    def seconds(self, most: int) -> list[float]:
        """Seconds of a round of width 0..most; between and beyond the known ones along straight lines."""
        known = self.table()
        return [_at(known, width) for width in range(most + 1)]

    def table(self) -> dict[int, float]:
        """The known widths' seconds, as `Costs` takes them."""
        if self._table is not None:
            return self._table
        each = np.exp(self._mean[0] + self._mean[1:]).tolist()
        seconds, least = dict(zip(self._widths, each, strict=True)), math.inf
        fitted = {}
        for width in sorted(seconds, reverse=True):
            fitted[width] = least = min(least, seconds[width])
        if 0 in fitted:
            fitted = {w: min(each, (w + _DEAREST) * fitted[0]) if w else each for w, each in fitted.items()}
        for width in sorted(fitted):
            narrower = [fitted[w] * (width + 1) / (w + 1) for w in fitted if 0 < w < width]
            fitted[width] = min([fitted[width], *narrower])
        self._table = dict(sorted(fitted.items()))
        return self._table

    def doubts(self) -> dict[int, float]:
        """Standard deviations of the logarithms of `table`, the machine's speed now apart."""
        own = np.minimum(np.sqrt(np.diagonal(self._variance)[1:]), _OLDEST).tolist()
        return dict(zip(self._widths, own, strict=True))

    def doubt(self, width: int, than: int = 0) -> float:
        """Standard deviation of the logarithm of how a width's seconds compare with another's; both are known."""
        here, there, variance = 1 + self._widths.index(width), 1 + self._widths.index(than), self._variance
        return math.sqrt(max(0.0, variance[here, here] + variance[there, there] - 2 * variance[here, there]))


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
    """The file for these weights on this machine, device and version of mlx, with kernels of ours or without."""
    ours = metal_factory() is not None
    machine = (platform.node(), platform.machine(), str(mx.default_device()), mx.__version__, ours)
    digest = blake2b(json.dumps([*machine, *fingerprints]).encode(), digest_size=16)
    return cache_directory() / "widths" / f"{digest.hexdigest()}.json"


def load(file: Path) -> Costs:
    """What an earlier process measured; nothing where the file is missing or is no table of seconds."""
    try:
        with file.open(encoding="utf-8") as text:
            kept = json.loads(text.read(_LONGEST))
        seconds, doubts = ({int(w): float(each) for w, each in kept[name].items()} for name in ("seconds", "doubts"))
        survival = [float(chance) for chance in kept["survival"]]
        credit, since_plain = float(kept["credit"]), int(kept["since_plain"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return Costs()
    fine = all(0 <= width <= _WIDEST and _QUICKEST <= each <= _SLOWEST for width, each in seconds.items())
    fine = fine and all(0 <= each <= _OLDEST for each in doubts.values()) and since_plain >= 0
    fine = fine and all(0 <= chance <= 1 for chance in survival) and math.isfinite(credit)
    return Costs(seconds, survival, credit, since_plain, doubts) if fine else Costs()


def save(file: Path, costs: Costs) -> None:
    """Keep the table for later processes, as far as the file can be written: nothing depends on it."""
    if not costs.table():
        return
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        # Whole or not at all, where two processes or threads write it.
        new = file.with_name(f"{file.name}.{os.getpid()}.{threading.get_ident()}")
        kept = {"seconds": costs.table(), "doubts": costs.doubts()}
        kept |= {name: getattr(costs, name) for name in ("survival", "credit", "since_plain")}
        new.write_text(json.dumps(kept))
        new.replace(file)
