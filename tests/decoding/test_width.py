"""How many tokens are proposed: simulated rounds on simulated machines without a clock, and the loop with any width."""

import math
import random
import threading
import time
from dataclasses import dataclass, field

import pytest
from scripted import PROMPT, TEXT, DraftingTarget, Run, ScriptedDrafter, all_wrong, drafter, oracle, right_with

from specmlx.decoding.costs import Costs, costs_file, load, save
from specmlx.decoding.draft_length import AutoWidth, FixedWidth, Survival, best_width, expected_tokens
from specmlx.decoding.policy import Policy
from specmlx.decoding.sampling import make_sampler
from specmlx.decoding.timer import round_seconds

# Seconds of a pass with T rows: one read of the weights, one read for every five rows (stock mlx), one for each row.
CURVES = {
    "flat": lambda T: 1 + 0.01 * (T - 1),
    "stepped": lambda T: math.ceil(T / 5) + 0.02 * (T - 1),
    "linear": lambda T: 0.1 + 0.9 * T,
}
DRAFTERS = {"cheap": 0.1, "dear": 0.6}
# The chance that a slot survives, by how many tokens of the text are there.
PATTERNS = {
    "steady high": lambda at: 0.9,
    "steady low": lambda at: 0.15,
    "hopeless": lambda at: 0.0,
    "alternating": lambda at: 0.1 if at // 100 % 2 else 0.9,
    "collapsing": lambda at: 0.9 if at < 750 else 0.02,
}
TOKENS = 1500


@dataclass
class Machine:
    """Rounds that take as long as a curve says, more or less, and keep what chance has it."""

    curve: str
    draft: str
    pattern: str
    tokens: int = 0
    seconds: float = 0.0
    widths: list[int] = field(default_factory=list)

    def run(self, widths, seed: int = 0, noise: float = 0.05, tokens: int = TOKENS) -> float:
        """Tokens a second over the whole text; what a round did is known one round later, as with lookahead."""
        rng, under_way = random.Random(seed), None
        while self.tokens < tokens:
            width, kept = widths.choose(), 0
            while kept < width and rng.random() < PATTERNS[self.pattern](self.tokens + kept):
                kept += 1
            seconds = CURVES[self.curve](width + 1) + (DRAFTERS[self.draft] if width else 0)
            self.tokens += kept + 1
            self.seconds += seconds
            self.widths.append(width)
            if under_way:
                widths.observed(*under_way)
            under_way = (width, kept, seconds * math.exp(rng.gauss(0, noise)))
        return self.tokens / self.seconds


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("draft", DRAFTERS)
@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("most", [7, 15])
def test_it_never_loses_and_comes_near_the_best_fixed_width(most, curve, draft, pattern):
    fixed = [Machine(curve, draft, pattern).run(FixedWidth(width)) for width in range(most + 1)]
    speeds = [Machine(curve, draft, pattern).run(AutoWidth(most), seed) for seed in (1, 2)]
    assert min(speeds) >= 0.95 * fixed[0]
    assert sum(speeds) / 2 >= 0.95 * max(fixed)


@pytest.mark.parametrize("most", [7, 15])
@pytest.mark.parametrize("seed", range(5))
def test_with_a_good_drafter_a_flat_curve_is_used_to_the_full_within_twenty_rounds(most, seed):
    machine = Machine("flat", "cheap", "steady high")
    machine.run(AutoWidth(most), seed)
    assert most in machine.widths[:20]
    assert sum(machine.widths[20:]) > 0.75 * most * len(machine.widths[20:])


def test_calibration_and_later_trials_take_two_hundredths_of_the_work():
    # Wider rounds never pay here, so all that is not plain is trying.
    for draft in DRAFTERS:
        machine = Machine("stepped", draft, "hopeless")
        machine.run(AutoWidth(7))
        plain = machine.widths.count(0) * CURVES["stepped"](1)
        # The first tries are lent, and the round after a try is under way before it is known.
        assert machine.seconds - plain - machine.tokens + machine.widths.count(0) < 0.02 * machine.seconds + 4


def test_after_plain_decoding_drafting_is_tried_at_growing_intervals():
    machine = Machine("flat", "cheap", "hopeless")
    machine.run(AutoWidth(7))
    at = [i for i, width in enumerate(machine.widths) if width]
    gaps = [b - a for a, b in zip(at, at[1:], strict=False) if b - a > 2]
    assert len(gaps) > 4 and min(gaps) < 20 and gaps[3] > 2 * gaps[1] and max(gaps) > 60


def test_a_choice_stands_until_another_promises_clearly_more():
    survival = [0.8] * 7
    seconds = [1.0, *(1.2 + 0.02 * width for width in range(1, 8))]
    best = best_width(seconds, survival)
    assert best == max(range(8), key=lambda width: expected_tokens(survival, width) / seconds[width])
    assert best_width(seconds, survival, best - 1) == best - 1
    assert best_width(seconds, survival, 1) == best
    # Not worth it: plain decoding needs no such promise.
    assert best_width([1.0, 1.5], [0.51], 1) == 0 and best_width([1.0, 1.5], [0.51], 0) == 0


def test_noise_does_not_make_it_waver():
    machine = Machine("flat", "cheap", "steady high")
    machine.run(AutoWidth(7), noise=0.2)
    changes = sum(a != b for a, b in zip(machine.widths[50:], machine.widths[51:], strict=False))
    assert changes < 0.05 * len(machine.widths)


def test_a_round_that_something_else_slowed_down_does_not_rule_a_width_out():
    class Hiccup(AutoWidth):
        """Its third width's first measured round, and plain decoding's, take twenty times as long."""

        hit = {0: 1, 3: 1}

        def observed(self, width: int, accepted: int, seconds: float | None, others=()) -> None:
            begun = self.costs.begun(width)
            if begun and self.hit.get(width):
                self.hit = self.hit | {width: 0}
                seconds *= 20
            super().observed(width, accepted, seconds)

    machine = Machine("flat", "cheap", "steady high")
    machine.run(Hiccup(7))
    assert sum(machine.widths[-100:]) > 0.9 * 7 * 100


def test_the_next_request_begins_with_what_this_one_was_like(tmp_path):
    for pattern, usual in (("hopeless", 0), ("steady high", 7)):
        file = tmp_path / pattern
        for _ in range(4):
            widths = AutoWidth(7, file=file)
            machine = Machine("flat", "dear", pattern)
            machine.run(widths)
            widths.keep()
        assert machine.widths[:20].count(usual) > 14
        assert len(load(file).survival) == 7


@pytest.mark.parametrize("width", [0, 7])
def test_the_luck_of_many_short_requests_is_not_held_against_the_widths_that_they_leave_out(width, tmp_path):
    file, usual = tmp_path / "costs", {0: 1.0, 1: 1.8, 7: 4.0}
    save(file, Costs(usual))
    for request in range(200):
        costs, rng = load(file), random.Random(request)
        # The machine is slow when a request begins, and then busy.
        for i in range(30):
            costs.observe(width, usual[width] * math.exp(rng.gauss(1.0 if i < 4 else 0, 0.5)))
        save(file, costs)
    plain, one, *_, seven = load(file).seconds(7)
    assert abs(math.log(one / plain / 1.8)) < 0.2 and abs(math.log(seven / plain / 4)) < 0.2


def short_requests(widths, curve: str, draft: str, chances: list[float], busy: bool, seed: int = 5) -> float:
    """Tokens a second over many answers of about 25 tokens, on a machine that is slow at first and that others use."""
    rng, tokens, seconds = random.Random(seed), 0, 0.0
    for request in range(40):
        by, most = widths(), tokens + max(2, int(25 * math.exp(rng.gauss(0, 0.4))))
        chance, speed, begun = chances[request % len(chances)], math.exp(rng.gauss(0, 0.3)), tokens
        while tokens < most:
            width, kept = min(by.choose(), most - tokens - 1), 0
            while kept < width and rng.random() < chance:
                kept += 1
            each = CURVES[curve](width + 1) + (DRAFTERS[draft] if width else 0)
            noise = rng.gauss(0.5 if tokens < begun + 4 else 0, 0.2 if busy else 0.05)
            other = rng.choice([2, 3, 10]) if busy and rng.random() < 0.1 else 1
            by.observed(width, kept, None if tokens == begun else each * speed * other * math.exp(noise))
            tokens, seconds = tokens + kept + 1, seconds + each
        if isinstance(by, AutoWidth):
            by.keep()
    return tokens / seconds


@pytest.mark.parametrize("busy", [False, True], ids=["alone", "busy"])
@pytest.mark.parametrize("chances", [[0.0], [0.15], [0.9], [0.0, 0.9]], ids=["hopeless", "low", "high", "by turns"])
@pytest.mark.parametrize("curve", CURVES)
def test_short_requests_in_a_row_do_not_lose_either(curve, chances, busy, tmp_path):
    fixed = [short_requests(lambda w=w: FixedWidth(w), curve, "dear", chances, busy, seed=1) for w in range(8)]
    files = [tmp_path / str(seed) for seed in (1, 2)]
    speeds = [
        short_requests(lambda file=file: AutoWidth(7, file=file), curve, "dear", chances, busy, seed)
        for seed, file in enumerate(files, 1)
    ]
    # What is learnt from few rounds while other programs run is learnt late.
    assert sum(speeds) / 2 >= (0.9 if busy else 0.95) * fixed[0]
    assert sum(speeds) / 2 >= 0.75 * max(fixed)


@pytest.mark.parametrize("times", [4, 90, 1e9])
def test_short_requests_find_out_that_a_width_was_wrongly_held_to_be_dear(times, tmp_path):
    file = tmp_path / "costs"
    save(file, Costs({0: 1.0, **{width: times + width for width in range(1, 8)}}, [0.8] * 7))
    for request in range(40):
        widths = AutoWidth(7, file=file)
        machine = Machine("flat", "cheap", "steady high")
        machine.run(widths, seed=request, tokens=36)
        widths.keep()
    assert sum(machine.widths) > 4 * len(machine.widths)


def test_a_width_that_was_surely_held_to_be_dear_is_tried_again_although_plain_rounds_are_seldom_measured():
    dear = Costs(
        {0: 1.0, **{width: 3.0 + width for width in range(1, 8)}}, [0.8] * 7, doubts=dict.fromkeys(range(8), 0.05)
    )
    machine = Machine("flat", "cheap", "steady high")
    machine.run(AutoWidth(7, dear), tokens=4000)
    assert machine.widths.count(0) > 500 and sum(machine.widths[-100:]) > 0.9 * 7 * 100


@pytest.mark.parametrize("seed", range(4))
def test_a_drafter_that_found_little_and_was_wrong_is_asked_again(seed):
    # As prompt lookup before a text begins to repeat itself: no two proposals in a row.
    widths, rng, before, late = AutoWidth(7), random.Random(seed), 0, []
    for n in range(800):
        asked = widths.choose()
        found = n >= 400 or (not before and rng.random() < 0.4)
        before = asked if found else 0
        widths.observed(before, before if n >= 400 else 0, (1 + 0.05 * before) * math.exp(rng.gauss(0, 0.05)))
        late.append(asked)
    assert sum(late[-200:]) > 0.8 * 7 * 200


def test_a_drafter_that_earlier_requests_could_not_measure_is_tried_again():
    machine = Machine("flat", "cheap", "steady high")
    machine.run(AutoWidth(7, Costs({0: 1.0}, [0.01] * 7)))
    assert sum(machine.widths[-100:]) > 0.9 * 7 * 100


def test_a_drafter_that_gives_fewer_tokens_than_asked_does_not_end_trying():
    widths, asked = AutoWidth(7), []
    for _ in range(120):
        asked.append(widths.choose())
        width = min(asked[-1], 2)
        widths.observed(width, width, 1 + 0.05 * width)
    late = asked[40:]
    assert len({*asked}) > 3 and max(late) > 2


def test_what_a_drafter_has_missed_is_not_held_against_drafting():
    class Missing(AutoWidth):
        """A round that drafts after a plain one takes half a plain one's time more."""

        last = 0

        def observed(self, width: int, accepted: int, seconds: float | None, others=()) -> None:
            missed, self.last = width and not self.last, width
            super().observed(width, accepted, seconds + 0.5 * missed)

    for pattern in ("hopeless", "steady low"):
        widths = Missing(7)
        Machine("flat", "cheap", pattern).run(widths)
        plain, *drafting = widths.costs.seconds(7)
        for width, each in enumerate(drafting, 1):
            assert abs(each / plain / (CURVES["flat"](width + 1) + DRAFTERS["cheap"]) - 1) < 0.1


def test_while_plain_decoding_stands_most_rounds_are_neither_measured_nor_thought_about():
    class Counting(Costs):
        observations = 0

        def observe(self, *round) -> None:
            self.observations += 1
            super().observe(*round)

    costs = Counting({0: 1.0, **{width: 2.0 + width for width in range(1, 8)}}, [0.0] * 7)
    machine = Machine("linear", "dear", "hopeless")
    machine.run(AutoWidth(7, costs))
    assert machine.widths.count(0) > 0.95 * len(machine.widths)
    assert costs.observations < len(machine.widths) / 5
    # The machine is followed all the same: it is as fast as those few rounds were.
    assert abs(costs.seconds(0)[0] / CURVES["linear"](1) - 1) < 0.1


def test_equal_observations_give_equal_widths():
    runs = [Machine("stepped", "cheap", "alternating") for _ in range(2)]
    for run in runs:
        run.run(AutoWidth(7), seed=3)
    assert runs[0].widths == runs[1].widths


def test_survival_is_counted_slot_by_slot_and_follows_a_collapse():
    survival = Survival(4)
    for _ in range(100):
        survival.observe(4, 2)
    s1, s2, s3, s4 = survival.estimates()
    assert s1 > 0.95 and s2 > 0.95 and s3 < 0.1 and abs(s4 - s3) < 0.1
    for _ in range(8):
        survival.observe(4, 0)
    assert survival.estimates()[0] < 0.4
    before = survival.estimates()
    survival.observe(0, 0)
    assert survival.estimates() == before


def test_costs_average_their_first_rounds_and_follow_the_machine_as_a_whole():
    costs = Costs()
    for width, seconds in ((0, 9.0), (0, 1.0), (0, 1.2), (3, 50.0), (3, 2.2)):
        costs.observe(width, seconds)
    plain, _, _, wide, *_ = costs.seconds(7)
    assert 1 <= plain <= 1.2 and 2 <= wide <= 2.4
    for _ in range(20):
        costs.observe(0, 1.1)
        costs.observe(3, 2.2)
    # Twice as slow, by another program: seen at one width, known of all.
    for _ in range(60):
        costs.observe(3, 4.4)
    assert 1.7 <= costs.seconds(3)[0] <= 2.4 and abs(costs.seconds(3)[3] - 4.4) < 0.3
    assert Costs({0: 1.0, 1: 2.0, 3: 4.0}).seconds(5) == [1, 2, 3, 4, 5, 6]


def test_costs_are_kept_in_a_file_that_may_be_missing_damaged_or_in_the_way(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECMLX_CACHE", str(tmp_path))
    file = costs_file("target", "drafter")
    assert file != costs_file("target", "another") and file.is_relative_to(tmp_path)
    assert not load(file).known(0)
    save(file, Costs({0: 1.0, 7: 1.5}))
    assert load(file).table() == {0: 1.0, 7: 1.5} and load(file).survival == [] and [*file.parent.iterdir()] == [file]
    tables = ['{"a": 1}', '{"0": -1}', '{"0": NaN}', '{"0": 1e308, "4": 1e-320}', '{"0": 1, "99999999": 2}']
    rest = '"doubts": {}, "survival": [], "credit": 0, "since_plain": 0'
    tables = [f'{{"seconds": {table}, {rest}}}' for table in tables]
    for damaged in ("", "[]", "[" * 200_000, '{"seconds": 3}', '{"seconds": {"0": 1}, "survival": []}', *tables):
        file.write_text(damaged)
        assert not load(file).known(0)
    file.write_text(f'{{"seconds": {{"0": 1}}, {rest}}}')
    assert load(file).known(0)
    save(tmp_path / "widths" / file.name / "below", Costs({0: 1.0}))
    # With what an earlier process measured, there is nothing to calibrate.
    assert AutoWidth(7, Costs({0: 1.0, 7: 1.1})).choose() == 7


def test_costs_that_several_threads_keep_are_whole_whenever_they_are_read(tmp_path):
    file, costs = tmp_path / "costs", Costs({width: 1.0 + width for width in range(16)}, [0.5] * 15)
    save(file, costs)
    threads = [threading.Thread(target=lambda: [save(file, costs) for _ in range(150)]) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert load(file).known(15)
    assert [*tmp_path.iterdir()] == [file]


class Random(FixedWidth):
    """Another width in every round."""

    def __init__(self, most: int, seed: int = 0):
        super().__init__(most)
        self.rng = random.Random(seed)

    def choose(self) -> int:
        return self.rng.randint(0, self.most)


@pytest.mark.parametrize("seed", range(4))
def test_the_text_is_the_plain_one_with_a_width_picked_at_random_each_round(seed):
    text = PROMPT + oracle(PROMPT, 120)
    run = Run().start(drafter=drafter(right_with(0.8), text), width=Random(7, seed), max_tokens=120)
    assert run.take() == text[len(PROMPT) :]
    assert len(set(run.target.passes)) == 8


def test_a_seeds_text_does_not_depend_on_widths_picked_at_random():
    def text(width):
        policy = Policy(make_sampler(1.0, top_p=0.9), seed=5)
        return Run().start(policy=policy, drafter=DraftingTarget(0.5), width=width, max_tokens=40).take()

    assert len({tuple(text(width)) for width in (0, 7, Random(7, 1), Random(7, 2))}) == 1


def test_without_a_seed_widths_picked_at_random_leave_the_distribution_as_it_is():
    # The first three tokens' distribution against plain decoding's, by the two-sample chi-square statistic.
    def counts(width, start):
        found = {}
        for seed in range(400):
            # Random keys, but the same in every run of this test.
            policy = Policy(make_sampler(0.25), seed=start + seed)
            policy.rule = "rejection"
            widths = Random(3, seed) if width is None else width
            run = Run().start(policy=policy, drafter=DraftingTarget(1.0), width=widths, max_tokens=3)
            given = tuple(run.take())
            found[given] = found.get(given, 0) + 1
        return found

    random_, plain = counts(None, 0), counts(0, 10_000)
    common = [key for key in random_ | plain if random_.get(key, 0) + plain.get(key, 0) >= 20]
    assert len(common) > 3
    statistic = sum((random_.get(k, 0) - plain.get(k, 0)) ** 2 / (random_.get(k, 0) + plain.get(k, 0)) for k in common)
    # Mean k, variance 2k.
    assert statistic < len(common) + 4 * math.sqrt(2 * len(common))


class Late(FixedWidth):
    """Plain rounds first, for some time."""

    def __init__(self, most: int, plain: int):
        super().__init__(most)
        self.plain = plain

    def choose(self) -> int:
        self.plain -= 1
        return 0 if self.plain >= 0 else self.most


@pytest.mark.parametrize("plain", [1, 5, 63, 64, 70])
@pytest.mark.parametrize("tap_ids", [(), (0,)])
def test_a_drafter_that_was_left_out_is_shown_what_it_missed_when_it_is_asked_again(plain, tap_ids):
    class Counting(ScriptedDrafter):
        shown = 0

        def observe(self, *args):
            self.shown += 1
            super().observe(*args)

    text = PROMPT + oracle(PROMPT, 100)
    by = Counting(text, right_with(0.9), tap_ids=tap_ids)
    run = Run().start(drafter=by, width=Late(7, plain), max_tokens=100)
    run.take(max(0, plain - 2))
    # Neither the prompt nor any round, until very many wait.
    assert by.shown == (plain > 66)
    assert run.take() == text[len(PROMPT) :]
    assert run.stats.accept_histogram[-1] > 0


@pytest.mark.parametrize("taken", [1, 2, 5, 9])
def test_rows_that_wait_for_a_drafter_are_not_lost_between_requests(taken):
    run = Run().start(drafter=drafter(), width=Late(7, 100), max_tokens=30)
    run.take(taken)
    text = TEXT[: len(PROMPT) + taken] + [9, 9]
    text += oracle(text, 20)
    by = run.conversation.draft.drafter
    by.text = text
    run.start(prompt=[9, 9], drafter=by, max_tokens=20)
    assert run.take() == text[-20:]
    assert len(by.contexts) == 1


@pytest.mark.parametrize(
    ("away", "waited", "overlapped", "taken"),
    [(3.0, 0.0, False, 1.0), (3.0, 1.0, True, 4.0), (3.0, 0.1, True, None), (0.3, 0.0, True, 4.0)],
)
def test_what_a_reader_does_with_tokens_is_not_a_rounds_time(away, waited, overlapped, taken):
    assert round_seconds(4.0, away, waited, overlapped) == taken


@pytest.mark.parametrize("lookahead", [False, True])
def test_a_slow_reader_does_not_make_rounds_dear(lookahead):
    class Watched(FixedWidth):
        def __init__(self, most: int):
            super().__init__(most)
            self.taken: list[float | None] = []

        def observed(self, width: int, accepted: int, seconds: float | None, others=()) -> None:
            self.taken.append(seconds)

    widths = Watched(2)
    for _ in Run().start(drafter=drafter(), width=widths, max_tokens=18, lookahead=lookahead).tokens:
        time.sleep(0.05)
    # Three tokens a round: its reader takes 0.15 seconds of each, the table about a millisecond.
    assert len(widths.taken) == 6 and widths.taken[0] is None
    assert min(0.0 if seconds is None else seconds for seconds in widths.taken[1:]) < 0.1


class Clockless(AutoWidth):
    """Goes by the costs that it was given."""

    def observed(self, width: int, accepted: int, seconds: float | None, others=()) -> None:
        super().observed(width, accepted, None)


def test_what_happened_is_in_mode_and_reason():
    slow = Clockless(7, Costs({width: width + 1.0 for width in range(8)}, survival=[0.0] * 7))
    run = Run().start(drafter=drafter(all_wrong), width=slow, max_tokens=20)
    run.stats.mode = "speculative"
    run.take()
    assert run.stats.mode == "plain" and run.stats.proposed == 0
    assert run.stats.reason.startswith("drafting does not pay now: at best, a round with 1 drafted token takes")
    unknown = Clockless(7, Costs({0: 1.0}, survival=[0.0] * 7))
    Run().start(drafter=drafter(all_wrong), width=unknown, max_tokens=20).take()
    assert unknown.reason == "rounds that draft are not measured yet"
    fast = Clockless(7, Costs({0: 1.0, 7: 1.0}))
    run = Run().start(drafter=drafter(), width=fast, max_tokens=30)
    run.stats.mode = "speculative"
    run.take(16)
    assert run.stats.mode == "speculative" and run.stats.reason is None
