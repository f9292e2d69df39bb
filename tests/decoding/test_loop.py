"""The loop with a scripted drafter and a table for a target: no neural network."""

import math
import time

import mlx.core as mx
import pytest
from scripted import (
    PROMPT,
    TEXT,
    DraftingTarget,
    Run,
    TableTarget,
    V,
    all_right,
    all_wrong,
    drafter,
    oracle,
    right_with,
    wrong_at,
)

from specmlx.decoding.policy import Policy
from specmlx.decoding.processors import make_logits_processors
from specmlx.decoding.sampling import make_sampler

pytestmark = pytest.mark.usefixtures("batch_size")

GUESSES = {
    "all": all_right,
    "none": all_wrong,
    **{f"wrong at {j}": wrong_at(j) for j in (0, 1, 3, 6)},
    "right with .7": right_with(0.7),
    "one id": lambda index, slot, right: 0,
}


@pytest.mark.parametrize("guess", GUESSES)
@pytest.mark.parametrize("width", [0, 1, 2, 5, 7])
def test_the_text_is_the_plain_one_whatever_is_proposed(guess, width, batch_size):
    run = Run().start(drafter=drafter(GUESSES[guess]), width=width, max_tokens=40)
    assert run.take() == TEXT[len(PROMPT) :]
    assert run.finish == "length"
    stats, passes = run.stats, run.target.passes
    if batch_size > 1:
        # One more was under way, for the others.
        passes.pop()
    assert stats.rounds == len(passes) == sum(stats.accept_histogram)
    assert stats.generation_tokens == 40
    assert stats.proposed == sum(passes) - stats.rounds
    assert stats.accepted == sum(n * rounds for n, rounds in enumerate(stats.accept_histogram))
    assert stats.rows == sum(passes) and stats.draft_passes == sum(rows > 1 for rows in passes)
    if guess == "all":
        assert stats.rounds == math.ceil(40 / (width + 1))
        assert stats.accepted == 40 - (stats.rounds if batch_size == 1 else 40 // (width + 1))
    if guess in ("none", "wrong at 0"):
        assert stats.accepted == 0 and stats.rounds == 40
    if guess == "wrong at 3" and width > 3:
        assert stats.accept_histogram == [0, 0, 0, 10] and stats.acceptance_length == 4


def test_context_is_what_was_in_the_state_before_each_pass():
    run = Run().start(drafter=drafter(wrong_at(2)), width=4, max_tokens=12)
    run.take()
    before = len(PROMPT) - 1
    assert run.stats.context == before + (before + 3) + (before + 6) + (before + 9)


@pytest.mark.alone
@pytest.mark.parametrize("tap_ids", [(), (0,)])
def test_widths_may_change_from_round_to_round(tap_ids):
    widths = [4, 0, 0, 3, 0, 7, 1, 0, 0, 0, 4, 2]
    run = Run().start(drafter=drafter(right_with(0.8), widths=widths, tap_ids=tap_ids), max_tokens=30)
    assert run.take() == TEXT[len(PROMPT) :][:30]
    assert run.target.passes[: len(widths)] == [w + 1 for w in widths]


def test_what_leaves_says_whether_it_was_drafted_and_how_sure_the_target_was():
    run = Run().start(drafter=drafter(wrong_at(2)), width=4, max_tokens=12)
    tokens = list(run.tokens)
    assert [t.from_draft for t in tokens] == [True, True, False] * 4
    assert run.stats.accepted == sum(t.from_draft for t in tokens)
    for token in tokens:
        assert token.logprobs.shape == (V,) and token.logprobs.argmax().item() == token.id
        assert abs(mx.exp(token.logprobs).sum().item() - 1) < 1e-5


@pytest.mark.parametrize("index", range(8))
@pytest.mark.parametrize("guess", ["all", "right with .7", "none"])
def test_nothing_leaves_after_a_stop_token_at_any_place_of_a_block(index, guess):
    given = TEXT[len(PROMPT) :]
    assert len(set(given[:8])) == 8
    run = Run().start(drafter=drafter(GUESSES[guess]), stop_tokens={given[index]})
    assert run.take() == given[: index + 1]
    assert run.finish == "stop"
    assert guess != "all" or run.stats.rounds == 1
    # One more was under way.
    assert len(run.target.passes) == run.stats.rounds + 1
    assert run.ids() == PROMPT + given[:index]
    assert run.stats.accept_histogram[-1] > 0 and run.stats.generation_tokens == index + 1


@pytest.mark.parametrize("index", range(4))
def test_stop_beats_length_inside_a_block(index):
    stop = TEXT[len(PROMPT) + index]
    run = Run().start(drafter=drafter(), stop_tokens={stop, 63}, max_tokens=index + 1)
    run.take()
    assert run.finish == "stop" and len(run.given) == index + 1


@pytest.mark.parametrize("max_tokens", range(1, 18))
@pytest.mark.parametrize("guess", ["all", "right with .7"])
def test_never_one_token_more_is_given_or_verified(max_tokens, guess, batch_size):
    run = Run().start(drafter=drafter(GUESSES[guess]), max_tokens=max_tokens)
    assert run.take() == TEXT[len(PROMPT) :][:max_tokens]
    assert run.finish == "length"
    # Others that go on may need more rows.
    assert guess != "all" or batch_size > 1 or sum(run.target.passes) == max_tokens


def test_without_a_limit_it_goes_on_to_the_stop_token():
    given = oracle(PROMPT, 300, stop_tokens=[7])
    assert len(given) > 20 and given[-1] == 7
    run = Run().start(drafter=drafter(text=PROMPT + given), stop_tokens=[7], max_tokens=-1)
    assert run.take() == given and run.finish == "stop"


@pytest.mark.alone
@pytest.mark.parametrize(
    ("options", "word"),
    [
        (dict(width=8), "num_draft_tokens is 8: this drafter proposes 0 to 7"),
        (dict(width=-1), "num_draft_tokens is -1"),
        (dict(width=1, drafter=None), "num_draft_tokens is 1"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(options, word):
    run = Run()
    run.start(**{"prompt": PROMPT, "drafter": drafter(), **options})
    with pytest.raises(ValueError, match=word):
        run.take()
    assert run.target.passes == [] and run.conversation.tokens == []


@pytest.mark.parametrize("length", [1, 2, 3, 4, 9])
def test_a_prompt_may_be_short(length):
    text = TEXT[:length] + oracle(TEXT[:length], 12)
    run = Run().start(prompt=TEXT[:length], drafter=drafter(right_with(0.7), text), max_tokens=12)
    assert run.take() == text[length:]


def test_progress_counts_the_prompt_of_this_call_only():
    run = Run().start(drafter=None, max_tokens=4)
    run.take()
    seen = []
    run.start(prompt=[1] * 7, progress=lambda *at: seen.append(at), max_tokens=1, prefill_step_size=4)
    run.take()
    assert seen == [(0, 7), (3, 7), (6, 7), (7, 7)]


def test_two_texts_are_written_in_turn_with_one_drafter():
    target, shared = TableTarget(), drafter(right_with(0.7))
    prompts = [PROMPT, [2, 7, 1]]
    runs = [Run(target).start(prompt=p, drafter=drafter(right_with(0.7), p + oracle(p, 30))) for p in prompts]
    for count in (1, 3, 2, 1, 5, 8):
        for run in runs:
            run.take(count)
    assert [run.given for run in runs] == [oracle(p, 20) for p in prompts]
    same = [Run(target).start(drafter=shared, max_tokens=30) for _ in range(2)]
    for _ in range(30):
        for run in same:
            run.take(1)
    assert [run.given for run in same] == [oracle(PROMPT, 30)] * 2


SAMPLERS = [
    dict(temp=0.3),
    dict(temp=1.0),
    dict(temp=1.5, top_p=0.9),
    dict(temp=0.8, top_k=5, min_p=0.05),
    dict(temp=1.0, xtc_probability=0.5, xtc_threshold=0.1),
]
PENALTIES = [{}, dict(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.3, logit_bias={3: 1.0})]


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("penalties", PENALTIES)
def test_a_seed_gives_one_text_with_any_drafter_and_width(sampler, penalties):
    def text(by=None, width=None, seed=7):
        policy = Policy(make_sampler(**sampler), make_logits_processors(**penalties), seed)
        return Run().start(policy=policy, drafter=by, width=width, max_tokens=30).take()

    plain = text()
    assert text(seed=8) != plain and plain != TEXT[len(PROMPT) :][:30]
    sampled = PROMPT + plain
    for width in (0, 1, 4, 7):
        assert text(drafter(right_with(0.7), sampled), width) == plain
        assert text(DraftingTarget(noise=0.5), width) == plain
    assert text(drafter(all_wrong, sampled)) == plain


def test_a_seed_goes_on_where_the_conversation_is():
    def policy():
        return Policy(make_sampler(1.0), seed=3)

    whole = Run().start(policy=policy(), max_tokens=20).take()
    run = Run()
    first = run.start(policy=policy(), max_tokens=10).take()
    # The pending token is the last of the ten: given again as the prompt, it would stand one place further on.
    run.conversation.pending, prompt = None, [first[-1]]
    assert first + run.start(prompt=prompt, policy=policy(), max_tokens=10).take() == whole


def test_a_drafter_that_samples_from_the_targets_own_distribution_is_never_rejected():
    run = Run().start(policy=Policy(make_sampler(1.0, top_p=0.95)), drafter=DraftingTarget(), max_tokens=64)
    run.take()
    assert run.stats.accept_histogram == [0] * 7 + [8]
    run.start(prompt=[1], policy=Policy(make_sampler(1.0)), drafter=None, max_tokens=4).take()


def test_one_row_more_than_the_user_was_given_is_never_in_the_state():
    for stop in range(1, 12):
        run = Run().start(drafter=drafter(right_with(0.8)), max_tokens=stop)
        run.take()
        assert len(run.ids()) == len(PROMPT) + stop - 1


def test_time_that_the_user_takes_between_tokens_is_not_counted():
    begin = time.perf_counter()
    run = Run().start(drafter=drafter(), max_tokens=3)
    for _ in range(3):
        run.take(1)
        time.sleep(0.1)
    assert next(run.tokens, None) is None
    busy = time.perf_counter() - begin - 0.3
    assert 0 < run.stats.prefill_seconds + run.stats.decode_seconds <= busy
