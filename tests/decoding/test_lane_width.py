"""How many tokens lanes are drafted: simulated batches on simulated machines, and a real one's texts and reasons."""

import math
import random

import pytest
from batch_kit import KnowsTheTexts, ids_alone
from rig import SMALL, mlx_lm_twin, small_tokenizer, tiny
from scripted import ScriptedDrafter, all_right

from specmlx import batch_generate, generate, load
from specmlx.decoding.costs import Costs, costs_file
from specmlx.decoding.costs import load as load_costs
from specmlx.decoding.draft_length import AutoWidth
from specmlx.decoding.lane_width import LaneWidths
from specmlx.decoding.policy import Policy
from specmlx.decoding.stats import Stats
from specmlx.decoding.stops import StopStrings
from specmlx.generation.draft_options import choose_width
from specmlx.generation.responses import Reply
from specmlx.generation.scheduler import Job, Scheduler
from specmlx.targets.any_lm import AnyLM

MOST = 7
# Seconds of a pass over so many rows, of all lanes together: bound by memory, by arithmetic from 8 rows on, or always.
CURVES = {"memory": lambda rows: 1.0, "both": lambda rows: max(1.0, rows / 8), "arithmetic": lambda rows: rows / 2}
# What lanes keep of a slot, on average and each.
CHANCES = (0.9, 0.5, 0.85, 0.7, 0.9, 0.6, 0.8, 0.75)


class Fixed:
    """The same width in every round."""

    def __init__(self, width: int):
        self.width = width

    def __call__(self, lanes: int) -> "Fixed":
        return self

    def choose(self) -> int:
        return self.width

    def observed(self, *round) -> None:
        pass


def speed(widths: LaneWidths | Fixed, curve: str, lanes: int, rounds: int = 400, cut_every: int = 0) -> float:
    """Tokens a second; where `cut_every` says so, the last rounds of requests, which may have one drafted token."""
    rng, tokens, total = random.Random(1), 0, 0.0
    for n in range(1, rounds + 1):
        width = min(widths(lanes).choose(), 1 if cut_every and n % cut_every == 0 else MOST)
        kept = []
        for chance in CHANCES[:lanes]:
            kept.append(next((k for k in range(width) if rng.random() > chance), width))
        seconds = CURVES[curve](lanes * (width + 1)) + (0.1 if width else 0)
        tokens, total = tokens + sum(kept) + lanes, total + seconds
        widths(lanes).observed(width, kept[0], seconds * (1 + 0.05 * rng.random()), kept[1:])
    return tokens / total


@pytest.mark.parametrize("cut_every", [0, 2])
@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("lanes", [2, 8])
def test_lanes_come_near_the_best_fixed_width_whatever_bounds_the_work(lanes, curve, cut_every):
    fixed = [speed(Fixed(width), curve, lanes, cut_every=cut_every) for width in range(MOST + 1)]
    found = speed(LaneWidths(lambda about: AutoWidth(MOST)), curve, lanes, cut_every=cut_every)
    assert found >= 0.9 * max(fixed) and found >= 0.95 * fixed[0]


@pytest.mark.parametrize(
    ("chances", "least"), [((0, 0, 0, 0.9), 1.3), ((0, 0, 0.7, 0.7), 1.25), ((0.9, 0, 0, 0), 0.97), ((0,) * 4, 0.97)]
)
def test_lanes_that_no_drafter_serves_neither_stop_it_for_the_others_nor_lose(chances, least):
    for seed in range(4):
        rng, widths, tokens, total = random.Random(seed), LaneWidths(lambda about: AutoWidth(MOST)), 0, 0.0
        for _ in range(1500):
            width = widths(4).choose()
            kept = [next((k for k in range(width) if rng.random() >= chance), width) for chance in chances]
            seconds = 1 + 0.02 * width + 0.3 * (width > 0)
            tokens, total = tokens + sum(kept) + 4, total + seconds
            widths(4).observed(width, kept[0], seconds * math.exp(rng.gauss(0, 0.05)), kept[1:])
        assert tokens / total / 4 > least


def test_numbers_of_lanes_learn_apart_and_near_ones_together():
    made = []
    widths = LaneWidths(lambda about: made.append(about) or AutoWidth(MOST))
    assert [widths(n) is widths(8) for n in (4, 5, 7, 8, 9)] == [False, True, True, True, False]
    assert [widths(n) is widths(1) for n in (1, 2)] == [True, False] and sorted(made) == [1, 2, 4, 8, 16]


def test_what_a_batch_found_out_serves_the_next_one():
    model, tokenizer = load()
    prompts = [tokenizer.encode(f"Can you count from {n} up to {n + 9}? ") for n in range(11, 17)]
    want = [generate(model, tokenizer, prompt, max_tokens=30) for prompt in prompts]
    file = costs_file(model.fingerprint, model.draft_model.fingerprint, "4 lanes")
    file.unlink(missing_ok=True)
    reasons = []
    for _ in range(2):
        found = batch_generate(model, tokenizer, prompts, max_tokens=30, max_lanes=3)
        assert found.texts == want
        reasons.append(found.request_stats[0].reason or "")
        assert load_costs(file).known(0)
    assert "measured first" not in reasons[1]


def test_other_kernels_and_profiled_rounds_have_costs_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECMLX_CACHE", str(tmp_path))
    model, tokenizer = load()
    file = choose_width(model, model.draft_model, "auto").file
    assert file == costs_file(model.fingerprint, model.draft_model.fingerprint)
    generate(model, tokenizer, "Hi", max_tokens=9, profile=True)
    assert not file.exists()
    generate(model, tokenizer, "Hi", max_tokens=9)
    assert load_costs(file).known(0)
    model.kernel_note = "kernels by number of rows"
    assert choose_width(model, model.draft_model, "auto").file not in (None, file)


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
    class Clockless(AutoWidth):
        """Goes by the costs that it was given: drafting pays for two lanes, not for one."""

        def __init__(self, lanes: int):
            super().__init__(6, Costs({w: 1.0 + w * (lanes == 1) for w in range(7)}, [0.9 * (lanes > 1)] * 6))

        def observed(self, width: int, accepted: int, seconds: float | None, others=()) -> None:
            super().observed(width, accepted, None, others)

    tokenizer, model = small_tokenizer(tmp_path), tiny(3, **SMALL)
    prompts, counts, jobs = [[7, 8, 9], [5, 4]], [30, 20], []
    texts = [p + ids_alone(model, tokenizer, p, n, draft_model=None)[0] for p, n in zip(prompts, counts, strict=True)]
    scheduler = Scheduler(model, KnowsTheTexts(texts), LaneWidths(Clockless))
    for prompt, count in zip(prompts, counts, strict=True):
        stats = Stats("speculative")
        reply = Reply(tokenizer, StopStrings(()), len(prompt), stats)
        nothing = (lambda _: None,) * 2
        jobs.append(Job(prompt, Policy(), reply, stats, *nothing, frozenset(), count))
        scheduler.add(jobs[-1])
        for _ in range(6):
            scheduler.step()
        assert jobs[0].stats.mode == ("speculative" if jobs[0].stats.proposed else "plain")
    assert jobs[0].stats.proposed and jobs[0].stats.plain_share
