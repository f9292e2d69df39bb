"""The loop with a scripted drafter and a table for a target: no neural network."""

import itertools
import math
import sys
import time

import mlx.core as mx
import pytest
from scripted import (
    DraftingTarget,
    ScriptedDrafter,
    TableTarget,
    V,
    all_right,
    all_wrong,
    oracle,
    right_with,
    wrong_at,
)

from specmlx.speculation.loop import generate_tokens
from specmlx.speculation.policy import Policy
from specmlx.speculation.processors import make_logits_processors
from specmlx.speculation.sampling import make_sampler
from specmlx.speculation.stats import Stats

PROMPT = [3, 1, 4, 1, 5]
TEXT = PROMPT + oracle(PROMPT, 40)


class Run:
    """One conversation with a target, and what its last call gave."""

    def __init__(self, target: TableTarget | None = None):
        self.target = target or TableTarget()
        self.conversation = self.target.conversation()
        self.given: list[int] = []
        self.finish = None

    def start(self, prompt=PROMPT, policy=None, drafter=None, width=None, **options):
        self.prompt, self.stats, self.given, self.finish = list(prompt), Stats(), [], None
        self.tokens = generate_tokens(
            self.target, self.conversation, prompt, policy or Policy(), drafter, width, stats=self.stats, **options
        )
        return self

    def take(self, count: int = -1) -> list[int]:
        """The next `count` tokens, or all."""
        while count != 0 and (token := next(self.tokens, None)) is not None:
            assert self.finish is None, "a token after the last"
            self.given.append(token.id)
            self.finish = token.finish_reason
            self.check()
            count -= 1
        return self.given

    def check(self) -> None:
        """The conversation holds what the user was given: the newest token pending, the others in the state."""
        assert self.conversation.tokens[-len(self.given) - len(self.prompt) :] == self.prompt + self.given
        assert self.target.ids(self.conversation) == self.conversation.processed


def drafter(guess=all_right, text=TEXT, **options) -> ScriptedDrafter:
    return ScriptedDrafter(text, guess, **options)


GUESSES = {
    "all": all_right,
    "none": all_wrong,
    **{f"wrong at {j}": wrong_at(j) for j in (0, 1, 3, 6)},
    "right with .7": right_with(0.7),
    "one id": lambda index, slot, right: 0,
}


@pytest.mark.parametrize("guess", GUESSES)
@pytest.mark.parametrize("width", [0, 1, 2, 5, 7])
def test_the_text_is_the_plain_one_whatever_is_proposed(guess, width):
    run = Run().start(drafter=drafter(GUESSES[guess]), width=width, max_tokens=40)
    assert run.take() == TEXT[len(PROMPT) :]
    assert run.finish == "length"
    stats = run.stats
    assert stats.rounds == len(run.target.passes) == sum(stats.accept_histogram)
    assert stats.generation_tokens == 40
    assert stats.proposed == sum(run.target.passes) - stats.rounds
    assert stats.accepted == sum(n * rounds for n, rounds in enumerate(stats.accept_histogram))
    if guess == "all":
        assert stats.rounds == math.ceil(40 / (width + 1))
        assert stats.accepted == 40 - stats.rounds
    if guess in ("none", "wrong at 0"):
        assert stats.accepted == 0 and stats.rounds == 40
    if guess == "wrong at 3" and width > 3:
        assert stats.accept_histogram == [0, 0, 0, 10] and stats.acceptance_length == 4


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
    assert len(run.target.passes) == (1 if guess == "all" else run.stats.rounds)
    assert run.target.ids(run.conversation) == PROMPT + given[:index]
    assert run.stats.accept_histogram[-1] > 0 and run.stats.generation_tokens == index + 1


@pytest.mark.parametrize("index", range(4))
def test_stop_beats_length_inside_a_block(index):
    stop = TEXT[len(PROMPT) + index]
    run = Run().start(drafter=drafter(), stop_tokens={stop, 63}, max_tokens=index + 1)
    run.take()
    assert run.finish == "stop" and len(run.given) == index + 1


@pytest.mark.parametrize("max_tokens", range(1, 18))
@pytest.mark.parametrize("guess", ["all", "right with .7"])
def test_never_one_token_more_is_given_or_verified(max_tokens, guess):
    run = Run().start(drafter=drafter(GUESSES[guess]), max_tokens=max_tokens)
    assert run.take() == TEXT[len(PROMPT) :][:max_tokens]
    assert run.finish == "length"
    assert guess != "all" or sum(run.target.passes) == max_tokens


def test_without_a_limit_it_goes_on_to_the_stop_token():
    given = oracle(PROMPT, 300, stop_tokens=[7])
    assert len(given) > 20 and given[-1] == 7
    run = Run().start(drafter=drafter(text=PROMPT + given), stop_tokens=[7], max_tokens=-1)
    assert run.take() == given and run.finish == "stop"


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (dict(prompt=[]), "prompt is empty"),
        (dict(max_tokens=0), "max_tokens is 0"),
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


@pytest.mark.parametrize("taken", range(1, 10))
@pytest.mark.parametrize("leave", ["held", "closed"])
def test_a_text_left_after_any_token_of_a_block_goes_on_in_another_call(taken, leave):
    given = TEXT[len(PROMPT) :][:taken]
    text = TEXT[: len(PROMPT) + taken] + [9, 9]
    text += oracle(text, 20)
    run = Run()
    held = run.start(drafter=drafter(wrong_at(5)), width=7).tokens
    assert run.take(taken) == given
    if leave == "closed":
        held.close()
    run.start(prompt=[9, 9], drafter=drafter(right_with(0.7), text), width=7, max_tokens=20)
    assert run.take() == text[-20:]
    before = list(run.conversation.tokens)
    if leave == "closed":
        assert next(held, None) is None
    else:
        with pytest.raises(RuntimeError, match="another request has taken this conversation over"):
            next(held)
    assert run.conversation.tokens == before


def test_a_drafter_that_stays_sees_every_row_over_turns_and_one_that_comes_later_starts_there():
    scripted = drafter(right_with(0.7), max_width=4)
    other = drafter(all_right)
    run, text = Run(), []
    for turn, by in enumerate([scripted, scripted, other, scripted, None, scripted]):
        prompt = [turn + 1] * (turn + 1)
        text += prompt
        given = oracle(text, 5)
        text += given
        scripted.text = other.text = text
        run.start(prompt=prompt, drafter=by, max_tokens=5)
        assert run.take() == given
    assert run.conversation.tokens == text
    # Before turns 0, 3 and 5: another one, or none, had been at work.
    assert [c.start for c in scripted.contexts] == [0, 20, 39]


def test_a_context_that_observe_left_half_way_is_not_used_again():
    class Failing(ScriptedDrafter):
        failures = 0

        def observe(self, context, tokens, features, count):
            if self.failures:
                self.failures -= 1
                context.tokens.append(-1)
                raise ArithmeticError("half-way")
            super().observe(context, tokens, features, count)

    failing = Failing(TEXT, all_right)
    run = Run().start(drafter=failing)
    run.take(8)
    failing.failures = 1
    with pytest.raises(ArithmeticError):
        run.take(1)
    text = TEXT[: len(PROMPT) + 8] + [2]
    failing.text = text = text + oracle(text, 10)
    run.start(prompt=[2], drafter=failing, max_tokens=10)
    assert run.take() == text[-10:]


def raise_at(call: int, error: BaseException):
    """A logits processor that raises in its nth call, in the middle of a round."""
    calls = []

    def processor(tokens, logits):
        calls.append(len(tokens))
        if len(calls) == call:
            raise error
        return logits

    return processor


@pytest.mark.parametrize("call", [1, 2, 5, 9])
@pytest.mark.parametrize("error", [ArithmeticError(), KeyboardInterrupt()])
def test_an_exception_in_a_callable_of_the_user_loses_nothing(call, error):
    run = Run().start(policy=Policy(processors=[raise_at(call, error)]), drafter=drafter(wrong_at(2)), width=4)
    with pytest.raises(type(error)):
        run.take()
    # It was called once for each token of the rounds, three a round, and the round that it broke gave none.
    assert run.given == TEXT[len(PROMPT) :][: (call - 1) // 3 * 3]
    if run.given:
        run.check()
    text = run.conversation.tokens + [8]
    text += oracle(text, 10)
    run.start(prompt=[8], drafter=drafter(text=text), max_tokens=10)
    assert run.take() == text[-10:]


def test_an_exception_or_a_break_in_prefill_leaves_a_conversation_that_goes_on():
    class Enough(Exception):
        pass

    def progress(done, total):
        seen.append((done, total))
        if done == 6:
            raise Enough

    seen, prompt = [], [5, 4, 3, 2, 1, 0, 9, 8, 7, 6]
    run = Run().start(prompt=prompt, drafter=drafter(), prefill_step_size=3, progress=progress)
    with pytest.raises(Enough):
        run.take()
    assert seen == [(0, 10), (3, 10), (6, 10)]
    assert run.conversation.tokens == prompt[:6] == run.target.ids(run.conversation)
    text = prompt + oracle(prompt, 10)
    run.start(prompt=prompt[6:], drafter=drafter(right_with(0.7), text), max_tokens=10)
    assert run.take() == text[-10:]


class Interrupt:
    """Traces the library's lines and raises a Ctrl-C at the nth."""

    def __init__(self, line: int):
        self.left = line

    def __call__(self, frame, event, arg):
        if event == "call":
            return self if "specmlx" in frame.f_code.co_filename else None
        self.left -= event == "line"
        if self.left == 0:
            self.left = -1
            raise KeyboardInterrupt
        return self


def test_an_interrupt_at_any_line_leaves_a_conversation_that_goes_on():
    prompt = [3, 1, 4, 1, 5]
    text = prompt + oracle(prompt, 20)
    for line in itertools.count(1):
        scripted = drafter(wrong_at(1), text, max_width=2)
        run = Run().start(prompt=prompt, drafter=scripted, max_tokens=5, prefill_step_size=2)
        given, ended = [], False
        sys.settrace(Interrupt(line))
        try:
            for token in run.tokens:
                given.append(token.id)
            ended = True
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        if ended:
            break
        run.conversation.claim()
        held = run.conversation.tokens
        assert held == text[: len(held)] and run.target.ids(run.conversation) == run.conversation.processed
        # One token may be in that was just about to be given.
        assert len(held) - len(prompt + given) in (0, 1) or (not given and len(held) < len(prompt))
        scripted.text = held + [7] + oracle(held + [7], 5)
        assert run.start(prompt=[7], drafter=scripted, max_tokens=5).take() == scripted.text[-5:], line
    assert line > 300


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


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("index", range(6))
def test_bad_logits_are_an_error_with_their_position_after_all_that_came_before(value, index):
    at = len(PROMPT) + index
    run = Run(TableTarget(spoilt={at: value})).start(drafter=drafter(), width=4)
    with pytest.raises(RuntimeError, match=f"token {at} are NaN or infinite"):
        run.take()
    assert run.given == TEXT[len(PROMPT) : at]
    run.target.spoilt = {}
    text = run.conversation.tokens + [8]
    run.start(prompt=[8], max_tokens=5)
    assert run.take() == oracle(text, 5)


def test_bad_logits_of_a_row_that_is_rejected_do_not_matter():
    class Wrong(TableTarget):
        def verify(self, states, rows, tap_ids=()):
            done = super().verify(states, rows, tap_ids)
            beyond = mx.arange(done.rows)[None, :, None] > 2
            return states.open(done._replace(logits=mx.where(beyond, mx.nan, done.logits)))

    run = Run(Wrong()).start(drafter=drafter(wrong_at(2)), width=6, max_tokens=13)
    assert run.take() == TEXT[len(PROMPT) :][:13]


@pytest.mark.parametrize("bad", [-1, V, 10**9, -(10**9)])
@pytest.mark.parametrize("policy", ["greedy", "rejection", "coupled", "penalties"])
def test_a_proposal_outside_the_vocabulary_is_an_error_and_loses_nothing(bad, policy):
    policies = {
        "greedy": Policy(),
        "rejection": Policy(make_sampler(1e-6)),
        "coupled": Policy(make_sampler(1e-6), seed=1),
        "penalties": Policy(processors=make_logits_processors(repetition_penalty=1.0, frequency_penalty=1e-9)),
    }
    at = len(PROMPT) + 7
    scripted = drafter(lambda index, slot, right: bad if index == at else right, max_width=4)
    run = Run().start(policy=policies[policy], drafter=scripted)
    with pytest.raises(ValueError, match=f"proposed token {bad}: the vocabulary has {V}"):
        run.take()
    assert run.given == TEXT[len(PROMPT) :][:5]
    text = run.conversation.tokens + [8]
    run.start(prompt=[8], max_tokens=5)
    assert run.take() == oracle(text, 5)


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
        assert len(run.target.ids(run.conversation)) == len(PROMPT) + stop - 1


def test_time_that_the_user_takes_between_tokens_is_not_counted():
    begin = time.perf_counter()
    run = Run().start(drafter=drafter(), max_tokens=3)
    for _ in range(3):
        run.take(1)
        time.sleep(0.1)
    assert next(run.tokens, None) is None
    busy = time.perf_counter() - begin - 0.3
    assert 0 < run.stats.prefill_seconds + run.stats.decode_seconds <= busy
