"""How many tokens are proposed: simulated rounds on simulated machines with no clock, and the loop with any number."""

import json
import math
import random
import threading
import time

import pytest
from batch_kit import KnowsTheTexts, ids_alone
from rig import SMALL, mlx_lm_twin, small_tokenizer, tiny
from scripted import (
    PROMPT,
    TEXT,
    DraftingTarget,
    Run,
    ScriptedDrafter,
    all_right,
    all_wrong,
    drafter,
    oracle,
    right_with,
)

from specmlx import batch_generate, generate, load
from specmlx.decoding.draft_length import (
    MOST_SECONDS,
    AutoLength,
    Curve,
    FixedLength,
    LaneLengths,
    Measurement,
)
from specmlx.decoding.policy import Policy
from specmlx.decoding.round import round_seconds
from specmlx.decoding.sampling import make_sampler
from specmlx.generation.scheduler import Scheduler
from specmlx.generation.settings import auto_length
from specmlx.kernels.choice.table import power_mode
from specmlx.targets.any_lm import AnyLM

# Plain rounds' worth of a pass with T rows: one read of the weights, one read for every five rows (stock mlx), one for
# each row.
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
TOKENS, PLAIN = 1500, 0.02


class Machine:
    """Rounds that take as long as a curve says, or longer by chance, and keep what chance has it.

    noise: standard deviation of the logarithm; stalls: how often something else takes some rounds' time; load: how many
    times as long rounds take, by the seconds that have passed; long_load: the same for those that draft more than one.
    """

    def __init__(self, curve: str, draft: str, seed: int = 0, noise: float = 0.05, stalls: float = 0.0):
        self.curve, self.draft, self.rng = CURVES[curve], DRAFTERS[draft], random.Random(seed)
        self.noise, self.stalls, self.load, self.long_load = noise, stalls, lambda now: 1.0, 1.0
        self.now, self.numbers = 0.0, []

    def cost(self, n: int) -> float:
        """What a round takes when nothing else is going on, in plain rounds."""
        return (self.curve(n + 1) + (self.draft if n else 0)) / self.curve(1)

    def round(self, n: int, chance: float) -> tuple[int, float]:
        """What a round of `n` drafted tokens keeps, and the seconds that it took."""
        kept = next((k for k in range(n) if self.rng.random() >= chance), n)
        seconds = PLAIN * self.cost(n) * self.load(self.now) * math.exp(abs(self.rng.gauss(0, self.noise)))
        if self.rng.random() < self.stalls:
            seconds *= self.rng.choice([2, 3, 10])
        seconds *= self.long_load if n > 1 else 1.0
        self.now += seconds
        return kept, seconds

    def measure(self, length: AutoLength, missed: float = 0.0) -> float:
        """Give it a curve; the seconds that it took. `missed`: what the first round that drafts again takes more."""
        begin, measurement, last = self.now, Measurement(length, lambda: self.now), 1
        while not measurement.done:
            n = measurement.choose()
            kept, seconds = self.round(n, 0.8)
            self.now += missed * PLAIN * (n > 0 and not last)
            measurement.observed(n, kept, seconds)
            last = n
        return self.now - begin

    def answer(self, length, pattern: str, tokens: int = TOKENS) -> float:
        """Tokens a plain round's time; what a round did is known one round later, as with lookahead."""
        at, spent, under_way = 0, 0.0, None
        while at < tokens:
            n = length.choose()
            kept = 0
            while kept < n and self.rng.random() < PATTERNS[pattern](at + kept):
                kept += 1
            seconds = self.round(n, 0)[1]
            at, spent = at + kept + 1, spent + self.cost(n)
            self.numbers.append(n)
            if under_way:
                length.observed(*under_way)
            under_way = n, kept, seconds
        return at / spent


def measured(most: int, machine: Machine) -> AutoLength:
    length = AutoLength(most)
    machine.measure(length)
    return length


def exact(most: int, curve: str, draft: str, survival=()) -> Curve:
    """What a measurement without noise finds."""
    machine = Machine(curve, draft)
    return Curve({n: PLAIN * machine.cost(n) for n in range(most + 1)}, list(survival), measured=1)


# Choosing


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("draft", DRAFTERS)
@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("most", [7, 15])
def test_it_never_loses_and_comes_near_the_best_fixed_number(most, curve, draft, pattern):
    machines = [Machine(curve, draft, seed) for seed in range(1, 5)]
    fixed = [sum(machine.answer(FixedLength(n), pattern) for machine in machines) / 4 for n in range(most + 1)]
    speeds = [machine.answer(measured(most, machine), pattern) for machine in machines]
    assert min(speeds) >= 0.95 * fixed[0]
    assert sum(speeds) / 4 >= 0.95 * max(fixed)


@pytest.mark.parametrize("most", [7, 15])
@pytest.mark.parametrize("seed", range(5))
def test_with_a_good_drafter_a_flat_curve_is_used_to_the_full_within_twenty_rounds(most, seed):
    machine = Machine("flat", "cheap", seed)
    machine.answer(measured(most, machine), "steady high")
    assert most in machine.numbers[:20]
    assert sum(machine.numbers[20:]) > 0.75 * most * len(machine.numbers[20:])


@pytest.mark.parametrize("draft", DRAFTERS)
def test_probes_take_two_hundredths_of_the_work(draft):
    machine = Machine("stepped", draft)
    machine.answer(measured(7, machine), "hopeless")
    rounds = machine.numbers[60:]
    assert sum(machine.cost(n) - 1 for n in rounds) < 0.02 * sum(map(machine.cost, rounds)) and max(rounds) == 1


@pytest.mark.parametrize("curve", ["flat", "stepped"])
@pytest.mark.parametrize("survival", [0.0, 0.3, 0.95])
def test_every_request_proposes_at_least_one_token_at_first_however_bad_others_were(curve, survival):
    length = AutoLength(7, exact(7, curve, "dear", [survival] * 7))
    first = length.choose()
    assert first == 1 if survival < 0.5 else first > 2


def test_where_no_number_of_rows_wins_even_if_all_is_kept_nothing_is_ever_proposed():
    machine = Machine("linear", "dear")
    machine.answer(AutoLength(5, exact(5, "linear", "dear", [1.0] * 5)), "steady high")
    assert {*machine.numbers} == {0}


def test_after_plain_decoding_one_token_is_proposed_now_and_then_as_often_as_it_is_cheap():
    for draft, often in (("cheap", 8), ("dear", 41)):
        machine = Machine("flat", draft)
        machine.answer(measured(7, machine), "hopeless")
        at = [i for i, n in enumerate(machine.numbers) if n][-3:]
        assert machine.numbers[at[-1]] == 1 and {b - a for a, b in zip(at, at[1:], strict=False)} <= {
            often - 1,
            often,
            often + 1,
        }


@pytest.mark.parametrize("seed", range(4))
def test_a_text_that_can_be_drafted_again_is_drafted_soon(seed):
    machine = Machine("flat", "cheap", seed)
    length = measured(7, machine)
    machine.answer(length, "hopeless")
    machine.numbers.clear()
    machine.answer(length, "steady high")
    assert sum(machine.numbers[60:]) > 0.7 * 7 * len(machine.numbers[60:])


def test_noise_does_not_make_it_waver():
    machine = Machine("flat", "cheap", noise=0.2)
    machine.answer(measured(7, machine), "steady high")
    changes = sum(a != b for a, b in zip(machine.numbers[50:], machine.numbers[51:], strict=False))
    assert changes < 0.05 * len(machine.numbers)


@pytest.mark.parametrize("seed", range(4))
def test_a_drafter_that_found_little_and_was_wrong_is_asked_again(seed):
    # As prompt lookup before a text begins to repeat itself: no two proposals in a row.
    length, rng, before, late = AutoLength(7, exact(7, "flat", "cheap")), random.Random(seed), 0, []
    for n in range(800):
        asked = length.choose()
        found = n >= 400 or (not before and rng.random() < 0.4)
        before = asked if found else 0
        length.observed(before, before if n >= 400 else 0, None)
        late.append(asked)
    assert sum(late[-200:]) > 0.8 * 7 * 200


def test_a_drafter_that_gives_fewer_tokens_than_asked_is_asked_for_more_all_the_same():
    length, asked = AutoLength(7, exact(7, "flat", "cheap")), []
    for _ in range(120):
        asked.append(length.choose())
        length.observed(min(asked[-1], 2), min(asked[-1], 2), None)
    assert min(asked[40:]) > 2


def test_equal_observations_give_equal_numbers():
    machines = [Machine("stepped", "cheap", seed=3) for _ in range(2)]
    for machine in machines:
        machine.answer(measured(7, machine), "alternating")
    assert machines[0].numbers == machines[1].numbers


def test_survival_is_counted_slot_by_slot_and_follows_a_collapse():
    length = AutoLength(4, exact(4, "flat", "cheap"))
    for _ in range(100):
        length.observed(4, 2, None)
    s1, s2, s3, s4 = length.survival
    assert s1 > 0.95 and s2 > 0.95 and s3 < 0.1 and s4 == 0.9
    for _ in range(12):
        length.observed(4, 0, None)
    assert length.survival[0] < 0.5
    before = [*length.survival]
    length.observed(0, 0, None)
    assert length.survival == before


def test_a_long_context_makes_rounds_alike_since_its_keys_are_read_once():
    curve = exact(7, "linear", "cheap", [0.9] * 7)
    near, far = AutoLength(7, curve, row_share=1e-4), AutoLength(7, curve, row_share=1e-4)
    far.context = 100_000
    assert near.choose() == 1 and near.reason
    assert far.choose() > 3


def test_the_next_request_begins_with_what_this_one_was_like(tmp_path):
    for pattern, usual in (("hopeless", 0), ("steady high", 7)):
        file = tmp_path / pattern
        exact(7, "flat", "dear").save(file)
        for _ in range(4):
            length, machine = AutoLength(7, file=file), Machine("flat", "dear")
            machine.answer(length, pattern)
            length.keep()
        assert machine.numbers[:20].count(usual) > 14
        assert len(Curve.load(file).survival) == 7


def short_requests(machine: Machine, new, chances: list[float], seed: int = 5) -> float:
    """Tokens a plain round's time over many answers of about 25 tokens, on a machine that is slow at first."""
    rng, tokens, spent = random.Random(seed), 0, 0.0
    for request in range(40):
        length, most, at = new(), max(2, int(25 * math.exp(rng.gauss(0, 0.4)))), 0
        while at < most:
            n = min(length.choose(), most - at - 1)
            kept, seconds = machine.round(n, chances[request % len(chances)])
            length.observed(n, kept, seconds * (1.6 if at < 4 else 1.0) if at else None)
            at, spent = at + kept + 1, spent + machine.cost(n)
        tokens += at
        if isinstance(length, AutoLength):
            length.keep()
    return tokens / spent


@pytest.mark.parametrize("busy", [False, True], ids=["alone", "busy"])
@pytest.mark.parametrize("chances", [[0.0], [0.15], [0.9], [0.0, 0.9]], ids=["hopeless", "low", "high", "by turns"])
@pytest.mark.parametrize("curve", CURVES)
def test_short_requests_in_a_row_do_not_lose_either(curve, chances, busy, tmp_path):
    fixed = [short_requests(Machine(curve, "dear", 1), lambda n=n: FixedLength(n), chances) for n in range(8)]
    speeds = []
    for seed in (1, 2):
        file = tmp_path / str(seed)
        machine = Machine(curve, "dear", seed, *((0.2, 0.1) if busy else ()))
        measured(7, machine).curve.save(file)
        speeds.append(short_requests(machine, lambda file=file: AutoLength(7, file=file), chances))
    assert sum(speeds) / 2 >= 0.93 * fixed[0]
    assert sum(speeds) / 2 >= 0.9 * max(fixed)


# Measuring


@pytest.mark.parametrize("most", [1, 7, 8, 16])
@pytest.mark.parametrize("curve", CURVES)
def test_a_measured_curve_is_the_machines_whatever_noise_stalls_and_heat_there_were(curve, most):
    for seed in range(5):
        machine = Machine(curve, "dear", seed, noise=0.1, stalls=0.1)
        # It heats up, and is a third slower in the end.
        machine.load = lambda now: min(1 + now / 40, 1.33)
        length = AutoLength(most)
        assert machine.measure(length) < MOST_SECONDS + 4 and length.curve.measured == 1
        for n in length.curve.seconds:
            assert abs(math.log(length.curve.costs(most)[n] / machine.cost(n))) < 0.12


def test_a_quiet_machine_is_measured_in_two_turns_and_a_slow_one_in_five_seconds():
    machine = Machine("flat", "cheap", noise=0.0)
    length = AutoLength(8)
    assert machine.measure(length) < 2.1 * 3 * sum(PLAIN * machine.cost(n) for n in (0, 1, 3, 4, 7, 8))
    assert length.curve.calm and [*length.curve.seconds] == [0, 1, 3, 4, 7, 8]
    slow = Machine("flat", "cheap", noise=0.0)
    slow.load = lambda now: 25.0
    assert slow.measure(length) < MOST_SECONDS + 1 and [*length.curve.seconds] == [0, 1, 8]
    # One round alone takes longer than there is time: the curve stays.
    slow.load = lambda now: 500.0
    before = length.curve
    slow.measure(length)
    assert length.curve is before


def test_a_machine_that_others_leave_meanwhile_is_measured_until_it_stands():
    machine = Machine("linear", "cheap", noise=0.01)
    machine.load = lambda now: 3.0 if now < 1.5 else 1.0
    length = AutoLength(7)
    machine.measure(length)
    assert length.curve.calm and abs(length.curve.seconds[0] / PLAIN - 1) < 0.05
    assert abs(length.curve.costs(7)[7] / machine.cost(7) - 1) < 0.05


def test_what_a_drafter_has_missed_is_not_held_against_drafting():
    machine, length = Machine("flat", "cheap", noise=0.01), AutoLength(7)
    machine.measure(length, missed=5.0)
    assert abs(length.curve.costs(7)[1] / machine.cost(1) - 1) < 0.05


def test_a_number_is_no_dearer_than_a_larger_one_nor_by_rows_than_a_smaller_one():
    class Accident(Machine):
        """Rounds of 3 take ten times as long, and of 7 or more thirty times."""

        def round(self, n: int, chance: float) -> tuple[int, float]:
            self.long_load = {3: 10.0, 7: 30.0}.get(n, 1.0)
            return super().round(n, chance)

    machine, length = Accident("flat", "cheap", noise=0.0), AutoLength(8)
    machine.measure(length)
    costs = length.curve.costs(8)
    assert costs[3] == pytest.approx(costs[4]) and costs[7] == pytest.approx(costs[8]) and costs[8] < 1.3
    length = AutoLength(7)
    machine.measure(length)
    assert length.curve.costs(7)[7] == pytest.approx(length.curve.costs(7)[4] * 8 / 5)


def test_between_what_was_measured_costs_lie_on_straight_lines():
    assert Curve({0: 1.0, 1: 2.0, 3: 4.0}).costs(3) == [1, 2, 3, 4]
    # Not measured: a guess by which good drafting pays.
    assert AutoLength(7).choose() == 7
    assert AutoLength(7, Curve({0: 1.0, 7: 1.1})).choose() == 7


# When a curve is wrong


def answers(machine: Machine, file, count: int, most: int = 7) -> list[int]:
    """Answers of 36 tokens that can be drafted, each as in a process of its own; numbers of the last ones' rounds."""
    for _ in range(count):
        length = AutoLength(most, file=file)
        if length.curve.due:
            machine.measure(length)
        machine.numbers.clear()
        machine.answer(length, "steady high", 36)
        length.keep()
    return machine.numbers


@pytest.mark.parametrize("times", [2, 4, 90, 1e8])
def test_a_file_by_which_drafting_is_wrongly_held_to_be_dear_does_not_last(times, tmp_path):
    file, machine = tmp_path / "curve", Machine("flat", "cheap", seed=1)
    Curve({0: PLAIN, **{n: PLAIN * (times + n) for n in range(1, 8)}}, [0.8] * 7, measured=1).save(file)
    numbers = answers(machine, file, 12)
    assert sum(numbers) > 4 * len(numbers)


@pytest.mark.parametrize("seed", range(3))
def test_a_curve_made_while_others_were_busy_is_measured_again_once_they_have_gone(seed, tmp_path):
    file, machine = tmp_path / "curve", Machine("flat", "cheap", seed, noise=0.3, stalls=0.3)
    # Time slices: what is short gets through, what is long is interrupted.
    machine.load, machine.long_load = lambda now: 1.5, 6.0
    answers(machine, file, 4)
    machine.load, machine.long_load, machine.noise, machine.stalls = lambda now: 1.0, 1.0, 0.05, 0.0
    answers(machine, file, 1)
    numbers = answers(machine, file, 1)
    assert sum(numbers) > 5 * len(numbers)


def test_a_curve_that_rounds_agree_with_is_not_measured_again_for_long(tmp_path):
    file, machine = tmp_path / "curve", Machine("stepped", "dear", noise=0.1, stalls=0.05)
    exact(7, "stepped", "dear").save(file)
    for _ in range(60):
        answers(machine, file, 1)
        assert Curve.load(file).measured == 1


def test_on_a_machine_that_stays_slower_measuring_becomes_rarer_and_rarer(tmp_path):
    file, machine = tmp_path / "curve", Machine("stepped", "dear", noise=0.1)
    exact(7, "stepped", "dear").save(file)
    machine.load = lambda now: 2.0 if now // 20 % 2 else 1.0
    answers(machine, file, 200)
    assert 2 <= Curve.load(file).measured < 30


def test_what_a_reader_makes_of_the_time_says_nothing_about_the_curve():
    length = AutoLength(7, exact(7, "flat", "cheap"))
    for _ in range(100):
        length.observed(7, 7, None)
    assert not length.curve.due and length.curve.rounds == [0, 0]


# Keeping


def test_a_curve_is_kept_in_a_file_that_may_be_missing_damaged_or_in_the_way(tmp_path):
    file = tmp_path / "folder" / "curve"
    assert not Curve.load(file).seconds
    curve = Curve({0: 1.0, 7: 1.5}, [0.5], False, [0.1, -0.2], [3, 4], 2, 5)
    curve.save(file)
    assert Curve.load(file) == curve and [*file.parent.iterdir()] == [file]
    good = json.loads(file.read_text())
    wrong = [{"a": 1}, {"0": -1}, {"0": math.nan}, {"0": 1e308, "4": 1e-320}, {"0": 1, "99999999": 2}, {"1": 1}, 3, {}]
    damaged = [good | {"seconds": seconds} for seconds in wrong]
    damaged += [good | {"survival": ["a"]}, good | {"survival": [2]}, good | {"drift": [0]}, good | {"drift": 0}]
    damaged += [good | {"rounds": [-1, 0]}, good | {"rounds": [1]}, good | {"answers": "1"}, good | {"more": 1}, []]
    for text in ("", "[" * 200_000, *map(json.dumps, damaged)):
        file.write_text(text)
        assert Curve.load(file) == Curve()
        # What is damaged is as if it were missing.
        AutoLength(7, file=file).choose()
    below = file / "below"
    curve.save(below)
    # It can't be written: kept by this process alone.
    assert Curve.load(below) is curve


def test_another_pair_power_mode_version_or_kernel_has_a_curve_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECMLX_CACHE", str(tmp_path))
    model = load()[0]
    ours, other = model.draft_model, ScriptedDrafter([], all_right)
    files = [auto_length(model, drafter).file for drafter in (ours, other)]
    files += [auto_length(model, ours, "2 lanes").file]
    for name, value in (("power_mode", lambda: "lowpowermode 1"), ("metal_factory", lambda: print)):
        monkeypatch.setattr(f"specmlx.generation.settings.{name}", value)
        files.append(auto_length(model, ours).file)
    monkeypatch.setattr("specmlx.__version__", "0.0.0")
    files.append(auto_length(model, ours).file)
    model.kernel_note = "kernels by number of rows"
    files.append(auto_length(model, ours).file)
    assert len({*files}) == len(files) and all(file.is_relative_to(tmp_path) for file in files)


def test_the_power_mode_is_what_pmset_says_on_a_mac_and_nothing_elsewhere(tmp_path, monkeypatch):
    pmset = tmp_path / "pmset"
    pmset.write_text("#!/bin/sh\necho 'Currently in use:'\necho ' lowpowermode         1'\necho ' sleep 1'\n")
    pmset.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for platform, mode in (("linux", ""), ("darwin", "lowpowermode 1")):
        monkeypatch.setattr("sys.platform", platform)
        power_mode.cache_clear()
        assert power_mode() == mode
    power_mode.cache_clear()


def test_curves_that_several_threads_keep_are_whole_whenever_they_are_read(tmp_path):
    file, curve = tmp_path / "curve", Curve({n: 1.0 + n for n in range(16)}, [0.5] * 15)
    curve.save(file)
    threads = [threading.Thread(target=lambda: [curve.save(file) for _ in range(50)]) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert Curve.load(file) == curve
    assert [*tmp_path.iterdir()] == [file]


# The loop


class Random(FixedLength):
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


class Late(FixedLength):
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
    class Watched(FixedLength):
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


class Clockless(AutoLength):
    """Goes by the costs that it was given."""

    def observed(self, n: int, accepted: int, seconds: float | None, others=()) -> None:
        super().observed(n, accepted, None, others)


def test_what_happened_is_in_mode_and_reason():
    slow = Clockless(7, Curve({n: n + 1.0 for n in range(8)}, survival=[0.0] * 7))
    run = Run().start(drafter=drafter(all_wrong), width=slow, max_tokens=20)
    run.stats.mode = "speculative"
    run.take()
    assert run.stats.mode == "plain" and run.stats.proposed == 0
    assert run.stats.reason.startswith("drafting does not pay now: at best, a round with 1 drafted token takes")
    fast = Clockless(7, Curve({0: 1.0, 7: 1.0}))
    run = Run().start(drafter=drafter(), width=fast, max_tokens=30)
    run.stats.mode = "speculative"
    run.take(16)
    assert run.stats.mode == "speculative" and run.stats.reason is None


def test_a_pair_that_is_new_is_measured_before_its_first_answer_and_never_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SPECMLX_CACHE", str(tmp_path))
    monkeypatch.setenv("SPECMLX_CALIBRATE", "1")
    monkeypatch.setattr("specmlx.decoding.draft_length.MOST_SECONDS", 1.0)
    model, tokenizer = load()
    plain = generate(model, tokenizer, "Hi", max_tokens=9, num_draft_tokens=0, seed=3, sampler=make_sampler(1.0))
    file = auto_length(model, model.draft_model).file
    for calibrate, said in ((False, 0), (True, 1), (True, 0)):
        text = generate(model, tokenizer, "Hi", max_tokens=9, seed=3, sampler=make_sampler(1.0), calibrate=calibrate)
        assert text == plain
        assert capsys.readouterr().err.count("measuring what rounds take with DSpark") == said
        if said:
            # It is not measured again in the same test, whatever the machine did.
            curve = Curve.load(file)
            assert {*curve.seconds} <= {0, 1, 3, 4, 7, 8} and curve.measured == 1 and curve.answers == 1
            Curve(curve.seconds, curve.survival, measured=9).save(file)


def test_profiled_rounds_say_nothing_about_the_curve(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECMLX_CACHE", str(tmp_path))
    model, tokenizer = load()
    file = auto_length(model, model.draft_model).file
    exact(8, "flat", "cheap").save(file)
    generate(model, tokenizer, "Hi", max_tokens=9, profile=True)
    assert Curve.load(file).answers == 0
    generate(model, tokenizer, "Hi", max_tokens=9)
    assert Curve.load(file).answers == 1


# Lanes

MOST = 7
# Seconds of a pass over so many rows, of all lanes together: bound by memory, by arithmetic from 8 rows on, or always.
BOUNDS = {"memory": lambda rows: 1.0, "both": lambda rows: max(1.0, rows / 8), "arithmetic": lambda rows: rows / 2}
# What lanes keep of a slot, on average and each.
CHANCES = (0.9, 0.5, 0.85, 0.7, 0.9, 0.6, 0.8, 0.75)


def lanes_curve(bound: str, lanes: int) -> Curve:
    return Curve({n: BOUNDS[bound](lanes * (n + 1)) + (0.1 if n else 0) for n in range(MOST + 1)})


def speed(lengths, bound: str, lanes: int, rounds: int = 400, cut_every: int = 0) -> float:
    """Tokens a second; where `cut_every` says so, the last rounds of requests, which may have one drafted token."""
    rng, tokens, total, length = random.Random(1), 0, 0.0, lengths(lanes)
    for i in range(1, rounds + 1):
        n = min(length.choose(), 1 if cut_every and i % cut_every == 0 else MOST)
        kept = []
        for chance in CHANCES[:lanes]:
            kept.append(next((k for k in range(n) if rng.random() > chance), n))
        seconds = BOUNDS[bound](lanes * (n + 1)) + (0.1 if n else 0)
        tokens, total = tokens + sum(kept) + lanes, total + seconds
        length.observed(n, kept[0], seconds * (1 + 0.05 * rng.random()), kept[1:])
    return tokens / total


@pytest.mark.parametrize("cut_every", [0, 2])
@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("lanes", [2, 8])
def test_lanes_come_near_the_best_fixed_number_whatever_bounds_the_work(lanes, bound, cut_every):
    fixed = [speed(FixedLength(n), bound, lanes, cut_every=cut_every) for n in range(MOST + 1)]
    lengths = LaneLengths(lambda about: AutoLength(MOST, lanes_curve(bound, about)))
    found = speed(lengths, bound, lanes, cut_every=cut_every)
    assert found >= 0.9 * max(fixed) and found >= 0.95 * fixed[0]


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize(("known", "lanes"), [(1, 2), (1, 8), (4, 8)])
def test_until_their_number_is_measured_lanes_go_by_the_nearest_curve_at_as_many_rows(known, lanes, bound):
    new = {known: lanes_curve(bound, known)}
    lengths = LaneLengths(lambda about: AutoLength(MOST, new.get(about, Curve())))
    lengths(known)
    for n, cost in enumerate(lengths(lanes).costs):
        right = lanes_curve(bound, lanes).costs(MOST)[n]
        # Rather too dear, where there are more rows than were measured.
        assert 0.7 * right <= cost
    assert speed(lengths, bound, lanes) >= 0.9 * speed(FixedLength(0), bound, lanes)


@pytest.mark.parametrize(
    ("chances", "least"), [((0, 0, 0, 0.9), 1.25), ((0, 0, 0.7, 0.7), 1.2), ((0.9, 0, 0, 0), 0.97), ((0,) * 4, 0.97)]
)
def test_lanes_that_no_drafter_serves_neither_stop_it_for_the_others_nor_lose(chances, least):
    curve = {n: 1 + 0.02 * n + 0.3 * (n > 0) for n in range(MOST + 1)}
    for seed in range(4):
        rng, length, tokens, total = (
            random.Random(seed),
            LaneLengths(lambda _: AutoLength(MOST, Curve(curve)))(4),
            0,
            0.0,
        )
        for _ in range(1500):
            n = length.choose()
            kept = [next((k for k in range(n) if rng.random() >= chance), n) for chance in chances]
            tokens, total = tokens + sum(kept) + 4, total + curve[n]
            length.observed(n, kept[0], curve[n] * math.exp(rng.gauss(0, 0.05)), kept[1:])
        assert tokens / total / 4 > least


def test_numbers_of_lanes_learn_apart_and_near_ones_together():
    made = []
    lengths = LaneLengths(lambda about: made.append(about) or AutoLength(MOST))
    assert [lengths(n) is lengths(8) for n in (4, 5, 7, 8, 9)] == [False, True, True, True, False]
    assert [lengths(n) is lengths(1) for n in (1, 2)] == [True, False] and sorted(made) == [1, 2, 4, 8, 16]


def test_a_request_that_comes_to_others_is_proposed_a_token_soon():
    lengths = LaneLengths(lambda _: AutoLength(MOST, exact(MOST, "flat", "dear", [0.0] * MOST)))
    length = lengths(2)
    assert [length.choose() for _ in range(9)] == [1, *[0] * 8]
    lengths.context = 30
    assert lengths(2) is length and length.choose() == 1 and length.context == 30


def test_a_batch_measures_as_many_lanes_as_it_will_have_before_it_begins(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SPECMLX_CACHE", str(tmp_path))
    monkeypatch.setenv("SPECMLX_CALIBRATE", "1")
    monkeypatch.setattr("specmlx.decoding.draft_length.MOST_SECONDS", 1.5)
    model, tokenizer = load()
    prompts = [tokenizer.encode(f"Can you count from {n} up to {n + 9}? ") for n in range(11, 17)]
    want = [generate(model, tokenizer, prompt, max_tokens=30, num_draft_tokens=0) for prompt in prompts]
    for calibrate in (False, True):
        found = batch_generate(model, tokenizer, prompts, max_tokens=30, max_lanes=3, calibrate=calibrate)
        assert found.texts == want
        said = capsys.readouterr().err
        assert ("DSpark on this machine, 4 requests together" in said) == calibrate
    assert Curve.load(auto_length(model, model.draft_model, "4 lanes").file).seconds


def test_requests_that_take_turns_draft_all_that_there_is_and_say_so(tmp_path):
    tokenizer = small_tokenizer(tmp_path)
    model = AnyLM(mlx_lm_twin(tiny(3, **SMALL), **SMALL))
    prompt = [7, 8, 9] * 9
    text = [*prompt, *batch_generate(model, tokenizer, [prompt], max_tokens=20, return_token_ids=True).token_ids[0]]
    drafter = ScriptedDrafter(text, all_right, 4, tap_ids=())
    stats = batch_generate(model, tokenizer, [prompt], max_tokens=20, draft_model=drafter).request_stats[0]
    assert stats.reason.endswith("take turns, with as many drafted tokens as there can be")
    assert stats.accept_histogram[4] >= 3


def test_a_lane_that_began_plain_and_is_drafted_beside_another_says_so(tmp_path):
    def new(lanes: int) -> Clockless:
        """Drafting pays for two lanes, not for one."""
        return Clockless(6, Curve({n: 1.0 + n * (lanes == 1) for n in range(7)}, [0.9 * (lanes > 1)] * 6))

    tokenizer, model = small_tokenizer(tmp_path), tiny(3, **SMALL)
    prompts, counts, requests = [[7, 8, 9], [5, 4]], [30, 20], []
    texts = [p + ids_alone(model, tokenizer, p, n, draft_model=None)[0] for p, n in zip(prompts, counts, strict=True)]
    scheduler = Scheduler(model, tokenizer, KnowsTheTexts(texts), max_lanes=8)
    scheduler.length = LaneLengths(new)
    for prompt, count in zip(prompts, counts, strict=True):
        requests.append(scheduler.request(prompt, count))
        scheduler.add(requests[-1])
        for _ in range(6):
            list(scheduler.step())
        assert requests[0].stats.mode == ("speculative" if requests[0].stats.proposed else "plain")
    assert requests[0].stats.proposed and requests[0].stats.plain_share
