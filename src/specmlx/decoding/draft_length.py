"""How many tokens to propose: the width that delivers most tokens a second, by what rounds have cost and kept so far.

A decision depends on earlier rounds only, never on a token of the proposal that it cuts, so sampling stays exact.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from specmlx.decoding.costs import Costs, load, save

FULL = "full"
"""The width that is as many tokens as the drafter proposes."""

# Another width has to promise this much more before it is taken, since estimates are noisy.
HYSTERESIS = 1.04
# How many standard deviations dearer, compared with a plain round, a width is held to be.
CAUTION = 0.5
# Below this times plain decoding's speed, a width is left for it.
WORTHWHILE = 1.02
# What trying other widths may cost, as a share of all the work. That share of so many plain rounds is lent for a start,
# where nothing is known and where something is.
CALIBRATION, LENT, LENT_AGAIN = 0.02, 50, 10
# So much of what drafting has gained may be spent on trying, too.
FROM_GAINS = 0.05
# Plain rounds' worth of it that short requests may leave to later ones, and may take from them.
MOST_CREDIT, MOST_DEBT = 12.0, 2.0
# Rounds after which plain decoding is measured again while drafting gains less than `SURE` times, and otherwise: rounds
# that all draft can't tell a slower machine from a plain round that was held to be too dear.
STALE, LONG_STALE, SURE = 48, 192, 1.3
# From this standard deviation of the logarithm on, how another width compares with the chosen one is not sure.
DOUBTFUL = 0.15
# A request's first rounds count as trying: they go by what earlier requests were like.
FIRST = 8
# Rounds in a row that may try widths which are known.
MOST_IN_A_ROW = 2
# Rounds after which one that was to be tried has been seen, whatever became of it.
UNDER_WAY = 4
# While plain decoding stands and nothing is to be tried, it is thought about, and measured, once in so many rounds.
RESTING = 8
# How likely a slot is thought to survive before anything is known of it.
PRIOR = 0.7
# The same where drafting is tried again after it did not pay.
HOPE = 0.85
# Rounds of plain decoding before drafting is tried again: the first wait, doubled up to the last.
FIRST_WAIT, LAST_WAIT = 8, 64


def expected_tokens(survival: Sequence[float], width: int) -> float:
    """Tokens that a round of `width` delivers: 1 + s1 + s1 s2 + …, s_k being the chance that slot k survives."""
    tokens, kept = 1.0, 1.0
    for chance in survival[:width]:
        kept *= chance
        tokens += kept
    return tokens


def best_width(seconds: Sequence[float], survival: Sequence[float], current: int = 0) -> int:
    """The width of most tokens a second: `current` unless another promises `HYSTERESIS` times as many, or 0 as many.

    `seconds` is what a round of each width 0..W takes, `survival` the slots' chances s1..sW.
    """
    rates = [expected_tokens(survival, width) / each for width, each in enumerate(seconds)]
    best = max(range(len(rates)), key=rates.__getitem__)
    if rates[best] > HYSTERESIS * rates[current]:
        return best
    return current if rates[current] > WORTHWHILE * rates[0] else 0


@runtime_checkable
class Widths(Protocol):
    """What chooses the width of each round, 0..most.

    reason: why the rounds are narrower than they could be, in one line; None where they are not.
    """

    most: int
    reason: str | None

    def choose(self) -> int:
        """The next round's width. Of rounds that are under way, nothing is known yet."""

    def observed(self, width: int, accepted: int, seconds: float | None, others: Sequence[int] = ()) -> None:
        """A round of `width` kept `accepted` tokens and took `seconds` (None where that is unknown).

        others: what was kept of other sequences' proposals in the same round.
        """


class FixedWidth:
    """The same width in every round."""

    reason = None

    def __init__(self, most: int):
        self.most = most

    def choose(self) -> int:
        return self.most

    def observed(self, width: int, accepted: int, seconds: float | None, others: Sequence[int] = ()) -> None:
        pass


class Survival:
    """Running estimates of each slot's chance to survive, given that the slots before it did.

    Two memories, of about 50 and of about 5 trials. The short one replaces the long one where the first slot's chance
    has changed by more than noise does.
    """

    def __init__(self, most: int, prior: Sequence[float] = ()):
        """`prior`: what to think of the first slots before anything is known of them."""
        self.prior = [*prior, *[prior[-1] if prior else PRIOR] * most][:most]
        self.trials = 0
        self._long = [(0.0, 0.0)] * most
        self._short = [(0.0, 0.0)] * most

    def observe(self, width: int, accepted: int) -> None:
        """A round of `width` kept `accepted` of its tokens."""
        for slot in range(min(accepted + 1, width)):
            survived = slot < accepted
            self._long[slot] = _decayed(self._long[slot], 0.98, survived)
            self._short[slot] = _decayed(self._short[slot], 0.8, survived)
        self.trials += width > 0
        if width and self._changed():
            self._long = list(self._short)

    def forget(self) -> None:
        """Let what comes next weigh as much as all that was."""
        self._long = self._short = [(n and 1.0, n and kept / n) for n, kept in self._long]

    def estimates(self) -> list[float]:
        """s1..sW; a slot that was seldom reached leans on what was known before, and on the slot before it."""
        found, before = [], 1.0
        for (n, kept), prior in zip(self._long, self.prior, strict=True):
            # As much better or worse as the slot before it is.
            before = (kept + min(1.0, prior * before)) / (n + 1)
            found.append(before)
            before = before / prior if prior else 1.0
        return found

    def _changed(self) -> bool:
        (n, kept), (trials, survived) = self._long[0], self._short[0]
        chance = (kept + self.prior[0]) / (n + 1)
        noise = (chance * (1 - chance) / trials + 0.02) ** 0.5
        return n > 8 and abs(survived / trials - chance) > 3 * noise


class AutoWidth:
    """Chooses each round's width 0..most, and learns from what becomes of it.

    Plain decoding is measured first, then wider and wider rounds, as long as they may pay and trying them takes no more
    than `CALIBRATION` of the work; `costs` may be known from before. Where width 0 is best, drafting is tried again
    after a while, after a longer one each time.
    """

    def __init__(self, most: int, costs: Costs | None = None, file: Path | None = None):
        """`file` is where costs are kept between processes; it may be missing, and may be deleted."""
        self.most = most
        self.costs = costs or (load(file) if file else Costs())
        self.file = file
        self.survival = Survival(most, self.costs.survival)
        self._observed = 0
        self.current: int | None = None
        self._reason: str | None = "plain decoding is measured first"
        self._rest = 0
        self._unmeasured = 0
        self._last = 0
        self._work = 0.0
        self._spent = self._gained = 0.0
        self._credit = self.costs.credit
        self._lent = LENT_AGAIN if self.costs.known(0) else LENT
        self._wait, self._waited, self._paid = FIRST_WAIT, 0, 0
        self._since_plain = self.costs.since_plain
        # Widths that are tried in the next rounds, and those under way.
        self._next: list[int] = []
        self._trying: list[int] = []
        self._tried_at = 0
        self._tried_in_a_row = 0

    def keep(self) -> None:
        """Write what was learnt to the file."""
        if self.file is None:
            return
        weight = 0.4 * min(1.0, self.survival.trials / FIRST)
        pairs = zip(self.survival.prior, self.survival.estimates(), strict=True)
        self.costs.survival = [(1 - weight) * before + weight * found for before, found in pairs]
        if self.costs.known(0):
            left = self._credit + (self._allowed(0) - self._spent) / self.costs.seconds(0)[0]
            self.costs.credit = min(max(left, -MOST_DEBT), MOST_CREDIT)
        self.costs.since_plain = self._since_plain
        save(self.file, self.costs)

    @property
    def reason(self) -> str | None:
        """See `Widths.reason`; of the last decision."""
        return self._reason

    def _explain(self, known: list[int], seconds: list[float], survival: list[float]) -> str | None:
        if self.current:
            return None
        if known == [0]:
            return "rounds that draft are not measured yet"
        best = max(known[1:], key=lambda width: expected_tokens(survival, width) / seconds[width])
        tokens, times = expected_tokens(survival, best), seconds[best] / seconds[0]
        surely = "is not sure to" if tokens > times else "does not"
        drafted = f"{best} drafted token{'s' * (best > 1)}"
        return (
            f"drafting {surely} pay now: at best, a round with {drafted} takes {times:.2f} times a plain one for about "
            f"{tokens:.2f} tokens"
        )

    def choose(self) -> int:
        if not self.costs.known(0):
            return 0
        if self._rest:
            self._rest -= 1
            self._waited += 1
            self._since_plain += 1
            return 0
        seconds = self.costs.seconds(self.most)
        survival = self.survival.estimates()
        known = [width for width in range(self.most + 1) if self.costs.known(width)]
        measured = [math.inf] * (self.most + 1)
        for width in known:
            measured[width] = seconds[width] * math.exp(CAUTION * self.costs.doubt(width))
        self.current = best_width(measured, survival, self.current if self.current in known else 0)
        self._waited, self._paid = (0, self._paid + 1) if self.current else (self._waited + 1, 0)
        self._since_plain += 1
        if not self._next and not self._trying:
            self._next = self._trial(known, seconds, measured, survival)
        self._reason = self._explain(known, seconds, survival)
        self._tried_in_a_row = self._tried_in_a_row + 1 if self._next else 0
        if not self._next:
            if self.current == 0 and not self._trying:
                self._rest = RESTING - 1
            return self.current
        self._trying.append(self._next.pop())
        self._tried_at = self._observed
        return self._trying[-1]

    def observed(self, width: int, accepted: int, seconds: float | None, others: Sequence[int] = ()) -> None:
        """See `Widths.observed`."""
        for kept in (accepted, *others):
            self.survival.observe(width, kept)
        tried = width in self._trying
        if tried:
            self._trying.remove(width)
            if not any((accepted, *others)) and self.costs.known(width):
                # Good drafting seldom fails from its first slot on.
                self._next.clear()
        if width == 0:
            self._since_plain = 0
        missed, self._last = width and not self._last, width
        if seconds is None:
            return
        self._unmeasured += 1
        self._observed += 1
        self._work += seconds
        if self._rest and not width:
            return
        # A round that something else slowed down has not spent so much on trying.
        usual = min(seconds, 2 * self.costs.seconds(width)[width]) if self.costs.known(0) else seconds
        # The drafter had to see what it had missed, too.
        if not (missed and self.costs.known(width)):
            self.costs.observe(width, seconds, self._unmeasured)
            self._unmeasured = 0
        if self._observed > self._tried_at + UNDER_WAY:
            # It came out narrower: the drafter had no more, or there was no room.
            self._trying.clear()
        if not self.costs.known(0):
            return
        kept = (accepted + sum(others)) / (1 + len(others))
        gained = (kept + 1) * self.costs.seconds(0)[0] - usual
        self._gained += gained
        if tried or (width and self._observed <= FIRST):
            self._spent = max(0.0, self._spent - gained)

    def _trial(self, known, seconds, measured, survival) -> list[int]:
        """Widths to try in the next rounds: one that was never measured, drafting again, or plain decoding again."""
        new = self._untried(known, seconds, survival)
        if new is not None:
            # Its first round won't be measured.
            return [new] * (1 if self.current and self.costs.begun(new) else 2)
        if self.current == 0:
            again = self._retried(measured) if self._waited >= self._wait else None
            return [] if again is None else [again] * 3
        if self._paid > FIRST:
            self._wait = FIRST_WAIT
        gain = expected_tokens(survival, self.current) / seconds[self.current] * seconds[0]
        return [0] if self._since_plain > (STALE if gain < SURE else LONG_STALE) else []

    def _untried(self, known: list[int], seconds: list[float], survival: list[float]) -> int | None:
        """A width that is not surely known and would pay if it takes less than it is held to: costs go in steps.

        Next to a known width no more than that one, else half-way between that one and what is expected.
        """
        rate = HYSTERESIS * max(expected_tokens(survival, width) / seconds[width] for width in known)
        widest = known[-1]
        hopeful = []
        for width in range(1, min(self.most, 2 * widest + 1) + 1):
            # Nor again and again: one that is tried all the time would be compared with nothing.
            again = self._tried_in_a_row >= MOST_IN_A_ROW or width == self.current
            if width in known and (again or self.costs.doubt(width, self.current) < DOUBTFUL):
                continue
            below = max(w for w in known if w < width)
            least = seconds[below] if below == width - 1 else (seconds[below] + seconds[width]) / 2
            promise = expected_tokens(survival, width) / least
            if promise > rate and self._affords(seconds[width], expected_tokens(survival, width)):
                hopeful.append((promise, width))
        return max(hopeful)[1] if hopeful else None

    def _retried(self, measured: list[float]) -> int | None:
        """Drafting once more, where it would pay if it were good again."""
        if any(map(self.costs.known, range(1, self.most + 1))):
            width = best_width(measured, [HOPE] * self.most)
        else:
            width, measured = 1, self.costs.seconds(1)
        if not width or not self._affords(3 * measured[width], 3.0):
            return None
        self._wait, self._waited = min(2 * self._wait, LAST_WAIT), 0
        self.survival.forget()
        return width

    def _affords(self, seconds: float, tokens: float) -> bool:
        plain = self.costs.seconds(0)[0]
        loss = max(0.0, seconds - tokens * plain)
        return self._spent + loss <= self._allowed(self._lent * plain) + self._credit * plain

    def _allowed(self, lent: float) -> float:
        """Seconds that trying other widths may take."""
        return CALIBRATION * (self._work + lent) + FROM_GAINS * max(0.0, self._gained)


def _decayed(memory: tuple[float, float], decay: float, survived: bool) -> tuple[float, float]:
    n, kept = memory
    return n * decay + 1, kept * decay + survived
