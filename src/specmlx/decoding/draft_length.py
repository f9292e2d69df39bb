"""How many tokens to propose: the number with the most tokens a second, by measured costs and by what was kept lately.

What a round takes is the machine's: it is measured once for a pair (`Measurement`) and kept (`Curve`). How much of a
proposal is kept is the text's: a moving average in each request (`AutoLength`). A choice depends on earlier rounds
alone, never on a token of the proposal that it cuts, so sampling stays exact.
"""

import contextlib
import json
import math
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from hashlib import blake2b
from itertools import accumulate
from operator import mul
from pathlib import Path
from statistics import median

import mlx.core as mx
import numpy as np

import specmlx
from specmlx.formats.atomic import write_atomically
from specmlx.formats.cache import cache_directory
from specmlx.kernels.dispatch import metal_factory

FULL = "full"
"""The number that is as many tokens as the drafter proposes."""

# Measured are rounds of 1, 2, 4, 5 (for which stock mlx still reads its weights once), 8 and 16 rows; so many in a row,
# the first of which isn't counted (the drafter may have to see what it missed); for so many seconds at most. A minimum
# stands that falls no lower than this; the machine was calm if the middle round took no more than so many minima.
NUMBERS, IN_A_ROW, MOST_SECONDS, STABLE, CALM = (0, 1, 3, 4, 7, 15), 3, 5.0, 0.97, 1.25
# A curve is wrong if the last so many rounds took on average less, or more, than this (a logarithm) of what it says;
# and old after so many answers.
LONG, TOO_DEAR, TOO_CHEAP, OLD = 8, math.log(0.8), math.log(1.5), 64
# Before anything is known: a slot's chance to be kept; what drafting and each row add to a plain round.
CHANCE, DRAFTING, ROW = 0.9, 0.1, 0.02
# The pair's average counts for so many trials of a request's, which remembers so many, and moves so far to a request's.
# Behind a proposal that was kept whole, the next slot's chance comes so much nearer to 1.
FIRST, MEMORY, SHARE, HOPE = 4, 12, 0.5, 0.05
# How many times plain decoding's speed drafting has to promise; the share of plain decoding's time for probes.
WORTHWHILE, PROBES = 1.02, 0.015

_UNSAVED: dict[Path, "Curve"] = {}


class FixedLength:
    """The same number of drafted tokens in every round; others choose one of 0..most for each.

    reason: why rounds have fewer than they could have, in one line; None where they have not.
    """

    reason: str | None = None

    def __init__(self, most: int):
        self.most = most

    def __call__(self, lanes: int) -> "FixedLength":
        """What chooses for so many sequences that share their passes."""
        return self

    def choose(self) -> int:
        """The next round's number. Of rounds that are under way, nothing is known yet."""
        return self.most

    def observed(self, n: int, accepted: int, seconds: float | None, others: Sequence[int] = ()) -> None:
        """A round of `n` drafted tokens kept `accepted` of them and took `seconds` (None where that is unknown).

        others: what was kept of other sequences' proposals in the same round.
        """


@dataclass
class Curve:
    """What rounds of a pair take on a machine, and how much of the drafter's proposals was kept.

    seconds: of a round by its number of drafted tokens; empty before it was measured. settled: whether measuring came
    to an end on a calm machine. survival: by slot, how often it was kept, on average over requests. drift: average
    logarithm of what the last `rounds` rounds took of what they should, plain ones and those that draft. measured: how
    often; answers: since the last time.
    """

    seconds: dict[int, float] = field(default_factory=dict)
    survival: list[float] = field(default_factory=list)
    settled: bool = True
    drift: list[float] = field(default_factory=lambda: [0.0, 0.0])
    rounds: list[int] = field(default_factory=lambda: [0, 0])
    measured: int = 0
    answers: int = 0

    def costs(self, most: int, lanes: float = 1.0) -> list[float]:
        """What rounds of 0..most drafted tokens take, in plain rounds; `lanes`: how many times as many as measured."""
        if not self.seconds:
            return [1.0, *(1 + DRAFTING + ROW * n for n in range(1, most + 1))]
        known, rows = [*self.seconds], [lanes * (n + 1) for n in range(most + 1)]
        # Beyond what was measured, as many times dearer as there are more rows.
        found = [np.interp(n - 1, known, [*self.seconds.values()]) * max(1.0, n / (known[-1] + 1)) for n in rows]
        return [float(each / found[0]) for each in found]

    @property
    def due(self) -> bool:
        """Whether it has to be measured, or measured again.

        Rounds that are quicker than it says show that it was made in a bad hour. Slower ones, a machine that was not
        calm, or no number that could pay may be for now only: then after 1, 2, 4, … answers; else, after 64, 128, ….
        """
        long = [drift for drift, rounds in zip(self.drift, self.rounds, strict=True) if rounds >= LONG]
        if not self.seconds or min(long, default=0) < TOO_DEAR:
            return True
        pays = any(n and (n + 1) * self.seconds[0] > each for n, each in self.seconds.items())
        doubtful = not (self.settled and pays) or max(long, default=0) > TOO_CHEAP
        return self.answers >= (1 if doubtful else OLD) << min(max(self.measured - 1, 0), 16)

    @classmethod
    def load(cls, file: Path | None) -> "Curve":
        """What was kept; nothing where the file is missing or is no curve."""
        if file in _UNSAVED:
            return _UNSAVED[file]
        try:
            with file.open(encoding="utf-8") as text:
                found = cls(**json.loads(text.read(1 << 16)))
            found.seconds = dict(sorted((int(n), float(each)) for n, each in found.seconds.items()))
            fine = all(0 <= n < 256 and 1e-9 <= each <= 1e9 for n, each in found.seconds.items()) and 0 in found.seconds
            fine = fine and all(0 <= chance <= 1 for chance in found.survival)
            fine = fine and [-1 <= each <= 1 for each in found.drift] == [True, True] and len(found.rounds) == 2
            counts = (*found.rounds, found.measured, found.answers)
            return found if fine and all(type(n) is int and n >= 0 for n in counts) else cls()
        except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            return cls()

    def save(self, file: Path) -> None:
        """Keep it for other processes; for this one alone where the file can't be written."""
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, [json.dumps(asdict(self)).encode()])
        except (OSError, ValueError):
            _UNSAVED[file] = self


class AutoLength(FixedLength):
    """Chooses by a curve and by how often each slot was kept lately, which begins with the pair's average.

    Every request proposes at least one token at first, and while no number pays, one now and then, unless none could
    pay at all. context: rows before the round; row_share: what one of them adds to a plain round, by bytes. current:
    the last choice, probes apart.
    """

    def __init__(self, most: int, curve: Curve | None = None, file: Path | None = None, row_share: float = 0.0):
        """`file` is where the curve is kept between processes; it may be missing, and may be deleted."""
        self.most, self.file, self.row_share = most, file, row_share
        self.curve = curve or Curve.load(file)
        self.costs, known = self.curve.costs(most), self.curve.survival[:most] or [CHANCE]
        self.curve.survival = known + known[-1:] * (most - len(known))
        self.survival, self._trials = [*self.curve.survival], [FIRST] * most
        self.current = self.context = self._drafted = self.wait = 0

    def keep(self) -> None:
        """The request is over: write what was learnt to the file."""
        share, pairs = SHARE * min(1.0, self._drafted / FIRST), zip(self.curve.survival, self.survival, strict=True)
        self.curve.survival = [before + share * (found - before) for before, found in pairs]
        self.curve.answers += 1
        if self.file and self.curve.seconds:
            self.curve.save(self.file)

    def choose(self) -> int:
        """See `FixedLength.choose`."""
        # Keys and values are read once, whatever the number of rows.
        context = self.row_share * self.context
        costs = [(each + context) / (1 + context) for each in self.costs]
        # 1 + s1 + s1 s2 + …, where s_k is slot k's chance.
        tokens = list(accumulate([1.0, *accumulate(self.survival, mul)]))
        best = max(range(1, self.most + 1), key=lambda n: tokens[n] / costs[n])
        pays = tokens[best] > WORTHWHILE * costs[best]
        self.current, self.reason, self.wait = best if pays else 0, None, self.wait - 1
        if not pays:
            self.reason = (
                f"drafting does not pay now: at best, a round with {best} drafted token{'s' * (best > 1)} takes "
                f"{costs[best]:.2f} times a plain one for about {tokens[best]:.2f} tokens"
            )
            if self.wait >= 0 or all(n + 1 < WORTHWHILE * each for n, each in enumerate(costs) if n):
                return 0
            # What a probe finds counts for as much as all that was before.
            self._trials = [1] * self.most
        self.wait = math.ceil((costs[1] - 1) / PROBES)
        return self.current or 1

    def observed(self, n: int, accepted: int, seconds: float | None, others: Sequence[int] = ()) -> None:
        """See `FixedLength.observed`."""
        curve, kind = self.curve, n > 0
        if seconds and curve.seconds:
            took = math.log(seconds / curve.seconds[0] / (self.costs[n] + self.row_share * self.context))
            curve.rounds[kind] = min(curve.rounds[kind] + 1, LONG)
            curve.drift[kind] += (min(max(took, -1.0), 1.0) - curve.drift[kind]) / curve.rounds[kind]
        self._drafted, self.context = self._drafted + kind, self.context + accepted + 1
        for kept in (accepted, *others):
            for slot in range(min(kept + 1, n)):
                self._trials[slot] = min(self._trials[slot] + 1, MEMORY)
                self.survival[slot] += ((slot < kept) - self.survival[slot]) / self._trials[slot]
            if 0 < kept == n < self.most:
                self.survival[n] += HOPE * (1 - self.survival[n])


class Measurement(FixedLength):
    """Has rounds of each number by turns until `done`; then `length` has a new curve, if there was time for one.

    That is when a turn found none quicker than before, or after five seconds.
    """

    def __init__(self, length: AutoLength, clock: Callable[[], float] = time.perf_counter):
        super().__init__(length.most)
        self.length, self.done, self._clock = length, False, clock
        self._numbers = [*(n for n in NUMBERS if n < self.most), self.most]
        self._samples, self._best, self._chosen, self._count, self._last = {}, {}, 0, 0, -1
        self._at = clock()
        self._end = self._at + MOST_SECONDS

    def choose(self) -> int:
        """See `FixedLength.choose`."""
        self._chosen += 1
        return self._numbers[(self._chosen - 1) // IN_A_ROW % len(self._numbers)]

    def observed(self, n: int, accepted: int, seconds: float | None, others: Sequence[int] = ()) -> None:
        """See `FixedLength.observed`."""
        before, self._at = self._at, self._clock()
        if n == self._last:
            self._samples.setdefault(n, []).append(self._at - before)
        self._last, self._count = n, self._count + 1
        late = self._at > self._end
        if late or self._count % (IN_A_ROW * len(self._numbers)) == 0:
            before, self._best = self._best, {n: min(each) for n, each in self._samples.items()}
            stands = all(each > STABLE * before.get(n, math.inf) for n, each in self._best.items())
            self.done = stands or late
            if self.done and len(self._best) > 1 and 0 in self._best:
                self._take(stands and all(median(each) < CALM * min(each) for each in self._samples.values()))

    def _take(self, settled: bool) -> None:
        # An accident only makes rounds longer: none takes more than a wider one, or, by rows, than a narrower one.
        seconds = {n: min(self._best[m] for m in self._best if m >= n) for n in sorted(self._best)}
        for n in seconds:
            seconds[n] = min([seconds[n], *(seconds[m] * (n + 1) / (m + 1) for m in seconds if 0 < m < n)])
        curve = self.length.curve
        self.length.curve = Curve(seconds, curve.survival, settled, measured=curve.measured + 1)
        self.length.costs = self.length.curve.costs(self.most)


class LaneLengths:
    """What chooses for lanes that share their passes, for 1, 2, up to 4, up to 8 … of them apart, by `new`.

    A drafted token is a row in every lane: where a pass is bound by arithmetic, many lanes can pay for fewer of them.
    """

    def __init__(self, new: Callable[[int], AutoLength]):
        self._new, self.lengths = new, {}

    def __call__(self, lanes: int) -> AutoLength:
        """What chooses for so many; until that is measured, by the nearest curve, at as many rows."""
        about = 1 << (lanes - 1).bit_length()
        if about not in self.lengths:
            self.lengths[about] = self._new(about)
        near = min(self.lengths, key=lambda n: (not self.lengths[n].curve.seconds, max(n, about) / min(n, about)))
        self.lengths[about].costs = self.lengths[near].curve.costs(self.lengths[about].most, about / near)
        return self.lengths[about]

    def join(self, context: int) -> None:
        """A request with so many rows comes in: it is proposed a token at once."""
        for length in self.lengths.values():
            length.context, length.wait = max(length.context, context), 0

    def keep(self) -> None:
        """Write what was learnt, and go on from there: no round is under way."""
        for lanes, length in self.lengths.items():
            length.keep()
            self.lengths[lanes] = self._new(lanes)


@cache
def power_mode() -> str:
    """The macOS power mode, as `pmset` reports it; "" elsewhere and where it can't be read."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if sys.platform == "darwin":
            said = subprocess.run(["pmset", "-g"], capture_output=True, text=True, timeout=2).stdout
            return " ".join(sorted(" ".join(line.split()) for line in said.splitlines() if "powermode" in line))
    return ""


def curve_file(*what: str) -> Path:
    """The file for these weights and notes on this machine, with these versions, kernels and power mode."""
    chip = mx.device_info().get("device_name") or platform.processor()
    machine = (platform.node(), platform.machine(), chip, str(mx.default_device()), metal_factory() is not None)
    versions = (mx.__version__, specmlx.__version__, power_mode())
    digest = blake2b(json.dumps([*machine, *versions, *what]).encode(), digest_size=16)
    return cache_directory() / "draft_length" / f"{digest.hexdigest()}.json"
