"""How many tokens to propose: the number with the most tokens a second, by measured costs and by what was kept lately.

What a round takes is the machine's: measured once for a pair (`Measurement`) and kept (`Curve`). How much of a proposal
is kept is the text's: a moving average in each request (`AutoLength`). A choice depends on earlier rounds alone, never
on a token of the proposal that it cuts, so sampling stays exact.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, cycle
from operator import mul
from pathlib import Path

import numpy as np

from specmlx.formats.atomic import write_atomically

FULL = "full"  # as many tokens as the drafter proposes

# Measured are rounds of 1, 2, 4, 5 (for which stock mlx still reads its weights once), 8 and 16 rows; so many in a row,
# the first of which isn't counted (the drafter may have to see what it missed); for so many seconds at most. A minimum
# stands that falls no lower than this; the machine was calm if the middle round took no more than so many minima.
NUMBERS, IN_A_ROW, MOST_SECONDS, STABLE, CALM = (1, 3, 4, 7, 15), 3, 5.0, 0.97, 1.25
# A curve is wrong if the last so many rounds took on average less, or more, than this (a logarithm) of what it says;
# and old after so many answers.
LONG, TOO_DEAR, TOO_CHEAP, OLD = 8, math.log(0.8), math.log(1.5), 64
# What is thought before anything is known: a slot's chance to be kept, and what rounds take.
CHANCE, GUESS = 0.9, {0: 1.0, 1: 1.12, 15: 1.4}
# The pair's average counts for so many trials of a request's, which remembers so many, and moves so far to that of a
# request with enough drafts. Behind a proposal that was kept whole, the next slot's chance comes so much nearer to 1.
FIRST, MEMORY, SHARE, ENOUGH, HOPE = 8, 16, 0.5, 4, 0.05
# All that was counts for so many trials beside what a probe finds, and as little for a new pair. Probes take this share
# of plain decoding's time; after drafting that paid they come after so many rounds, twice as many, and so on.
KNOWN, PROBES, SOON = 2, 0.015, 8

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
        """A round of `n` drafted tokens kept `accepted`, of other sequences' `others`, in `seconds` (None: unknown)."""


@dataclass
class Curve:
    """What rounds of a pair take on a machine, and how much of the drafter's proposals was kept.

    seconds: of a round by its number of drafted tokens; empty before it was measured. survival: by slot, how often it
    was kept, on average over requests. calm: whether the machine was when it was measured. drift: average logarithm of
    what the last `rounds` plain and drafting rounds took of what they should. measured: how often; answers: since then.
    """

    seconds: dict[int, float] = field(default_factory=dict)
    survival: list[float] = field(default_factory=list)
    calm: bool = True
    drift: list[float] = field(default_factory=lambda: [0.0, 0.0])
    rounds: list[int] = field(default_factory=lambda: [0, 0])
    measured: int = 0
    answers: int = 0

    def costs(self, most: int, lanes: float = 1.0) -> list[float]:
        """What rounds of 0..most drafted tokens take, in plain rounds; `lanes`: how many times as many as measured."""
        known, seconds = zip(*(self.seconds or GUESS).items(), strict=True)
        # Beyond what was measured, as many times dearer as there are more rows.
        rows = [lanes * (n + 1) for n in range(most + 1)]
        found = [np.interp(n - 1, known, seconds) * max(1.0, n / (known[-1] + 1)) for n in rows]
        return [float(each / found[0]) for each in found]

    @property
    def due(self) -> bool:
        """Whether it has to be measured, or measured again.

        Quicker rounds than it says: it was made in a bad hour. Slower ones, a machine that was not calm, or no number
        that could pay may be for now only: then after 1, 2, 4, … answers; else after 64, 128, ….
        """
        long = [drift for drift, rounds in zip(self.drift, self.rounds, strict=True) if rounds >= LONG]
        if not self.seconds or min(long, default=0) < TOO_DEAR:
            return True
        pays = any(n and (n + 1) * self.seconds[0] > each for n, each in self.seconds.items())
        doubtful = not (self.calm and pays) or max(long, default=0) > TOO_CHEAP
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
            fine = 0 in found.seconds and len(found.drift) == len(found.rounds) == 2
            fine = fine and all(0 <= n < 256 and 1e-9 <= each <= 1e9 for n, each in found.seconds.items())
            fine = fine and all(0 <= chance <= 1 for chance in found.survival) and -1 <= min(found.drift) <= 1
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
    pay at all. context: rows before the round; row_share: what one of them adds to a plain round, by bytes.
    """

    def __init__(self, most: int, curve: Curve | None = None, file: Path | None = None, row_share: float = 0.0):
        """`file` is where the curve is kept between processes; it may be missing, and may be deleted."""
        self.most, self.row_share, self.file, self.curve = most, row_share, file, curve or Curve.load(file)
        self.costs, self._trials = self.curve.costs(most), [FIRST if self.curve.survival else KNOWN] * most
        known = self.curve.survival[:most] or [CHANCE]
        self.curve.survival = known + known[-1:] * (most - len(known))
        self.survival, self._soon = [*self.curve.survival], math.inf
        self.context = self._drafted = self.wait = 0

    def keep(self) -> None:
        """The request is over: write what was learnt to the file."""
        self.curve.answers += 1
        share = max(SHARE, 1 / self.curve.answers) * min(1.0, self._drafted / ENOUGH)
        pairs = zip(self.curve.survival, self.survival, strict=True)
        self.curve.survival = [before + share * (found - before) for before, found in pairs]
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
        pays = tokens[best] > costs[best]
        self.reason, self.wait, self._soon = None, self.wait - 1, SOON if pays else self._soon
        if not pays:
            self.reason = (
                f"drafting does not pay now: at best, a round with {best} drafted token{'s' * (best > 1)} takes "
                f"{costs[best]:.2f} times a plain one for about {tokens[best]:.2f} tokens"
            )
            if self.wait >= 0 or all(n + 1 <= each for n, each in enumerate(costs) if n):
                return 0
            self._trials, self._soon = [KNOWN] * self.most, 2 * self._soon
        self.wait = min(self._soon, math.ceil((costs[1] - 1) / PROBES))
        return best if pays else 1

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
    """Has rounds of each number by turns until a turn finds none quicker, or for five seconds: `length`'s new curve."""

    def __init__(self, length: AutoLength, clock: Callable[[], float] = time.perf_counter):
        self.length, self.most, self.done, self._clock = length, length.most, False, clock
        self._turn = [n for n in dict.fromkeys((0, self.most, *NUMBERS)) if n <= self.most for _ in range(IN_A_ROW)]
        self._next, self._rounds, self._samples, self._best, self._last = cycle(self._turn), 0, [], {}, -1
        self._begin = self._at = clock()

    def choose(self) -> int:
        """See `FixedLength.choose`."""
        return next(self._next)

    def observed(self, n: int, accepted: int, seconds: float | None, others: Sequence[int] = ()) -> None:
        """See `FixedLength.observed`."""
        before, self._at = self._at, self._clock()
        if n == self._last:
            self._samples.append((n, self._at - before))
        self._last, self._rounds, late = n, self._rounds + 1, self._at > self._begin + MOST_SECONDS
        if self.done or not (late or self._rounds % len(self._turn) == 0):
            return
        found = {n: sorted(each for m, each in self._samples if m == n) for n in {n for n, _ in self._samples}}
        before, best = self._best, {n: each[0] for n, each in found.items()}
        self.done, self._best = late or all(each > STABLE * before.get(n, math.inf) for n, each in best.items()), best
        if self.done and len(best) > 1 and 0 in best:
            # An accident only makes rounds longer: none takes more than a wider one, or, by rows, than a narrower one.
            least = {n: min(best[m] for m in best if m >= n) for n in sorted(best)}
            for n in least:
                least[n] = min([least[n], *(least[m] * (n + 1) / (m + 1) for m in least if 0 < m < n)])
            calm = all(each[len(each) // 2] < CALM * each[0] for each in found.values())
            curve = self.length.curve
            self.length.curve = Curve(least, curve.survival, calm, measured=curve.measured + 1)
            self.length.costs = self.length.curve.costs(self.most)


class LaneLengths:
    """What chooses for lanes that share their passes, for 1, 2, up to 4, up to 8 … of them apart, by `new`.

    A drafted token is a row in every lane: where a pass is bound by arithmetic, many lanes can pay for fewer of them.
    """

    def __init__(self, new: Callable[[int], AutoLength]):
        self._new, self.lengths, self.context = new, {}, 0

    def __call__(self, lanes: int) -> AutoLength:
        """What chooses for so many from now on; until that is measured, by the nearest curve, at as many rows."""
        about = 1 << (lanes - 1).bit_length()
        length = self.lengths.get(about) or self.lengths.setdefault(about, self._new(about))
        near = min(self.lengths, key=lambda n: (not self.lengths[n].curve.seconds, max(n, about) / min(n, about)))
        length.costs = self.lengths[near].curve.costs(length.most, about / near)
        # Who is new among them is proposed a token at once.
        length.context, length.wait = max(length.context, self.context), 0
        return length

    def keep(self) -> None:
        """Write what was learnt, and go on from there: no round is under way."""
        for lanes, length in self.lengths.items():
            length.keep()
            self.lengths[lanes] = self._new(lanes)
