"""The loop where it is left, interrupted, or shown what it must refuse: nothing that was given is lost."""

import itertools
import math
import sys

import mlx.core as mx
import pytest
from scripted import (
    PROMPT,
    TEXT,
    Run,
    ScriptedDrafter,
    TableTarget,
    V,
    all_right,
    drafter,
    oracle,
    right_with,
    wrong_at,
)

from specmlx.decoding.policy import Policy
from specmlx.decoding.processors import make_logits_processors
from specmlx.decoding.sampling import make_sampler

pytestmark = pytest.mark.usefixtures("batch_size")


@pytest.mark.parametrize("taken", range(1, 10))
def test_a_text_left_after_any_token_of_a_block_goes_on_in_another_call(taken, batch_size):
    given = TEXT[len(PROMPT) :][:taken]
    text = TEXT[: len(PROMPT) + taken] + [9, 9]
    text += oracle(text, 20)
    # A conversation leaves others before it goes on elsewhere.
    for leave in ("held", "closed") if batch_size == 1 else ("closed",):
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


def test_a_drafter_that_stays_sees_every_row_over_turns_and_one_that_comes_later_starts_there(batch_size):
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
    assert [c.start for c in scripted.contexts if c.start or batch_size == 1] == [0, 20, 39][batch_size > 1 :]


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
    # In the round ahead of the second one, whose tokens are given all the same.
    failing.failures = 1
    assert run.take(8) == TEXT[len(PROMPT) :][:16]
    with pytest.raises(ArithmeticError):
        run.take(1)
    text = TEXT[: len(PROMPT) + 16] + [2]
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
    assert run.conversation.tokens == prompt[:6] == run.ids()
    text = prompt + oracle(prompt, 10)
    run.start(prompt=prompt[6:], drafter=drafter(right_with(0.7), text), max_tokens=10)
    assert run.take() == text[-10:]


@pytest.mark.alone
@pytest.mark.parametrize("when", [0, 64, 128])
def test_a_prompt_that_is_being_taken_in_stops_once_its_conversation_is_another_requests(when):
    prompt, later = [i % V for i in range(200)], [7, 8, 9]
    run = Run()

    def progress(done, total):
        if done == when:
            # As in an app whose callback handles events: the user has sent something else.
            run.start(prompt=later).take(3)

    with pytest.raises(RuntimeError, match="taken this conversation over"):
        run.start(prompt=prompt, prefill_step_size=64, progress=progress).take()
    run.check()
    assert run.conversation.tokens == prompt[:when] + later + oracle(prompt[:when] + later, 3)


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


@pytest.mark.alone
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
        assert held == text[: len(held)] and run.ids() == run.conversation.processed
        # One token may be in that was just about to be given.
        assert len(held) - len(prompt + given) in (0, 1) or (not given and len(held) < len(prompt))
        scripted.text = held + [7] + oracle(held + [7], 5)
        assert run.start(prompt=[7], drafter=scripted, max_tokens=5).take() == scripted.text[-5:], line
    assert line > 300


def spoils(at: int, value: float, only: int | None = None):
    """A processor that puts the value into the logits of one position: into all of them, or one."""

    def processor(tokens, logits):
        spoilt = mx.full(logits.shape, value) if only is None else mx.where(mx.arange(V) == only, value, logits)
        return spoilt if len(tokens) == at else logits

    return processor


def picky(logprobs):
    if mx.any(mx.isnan(logprobs)).item():
        raise ValueError("the sampler can't take NaN")
    return mx.argmax(logprobs, axis=-1)


NOTHING = make_logits_processors({token: -math.inf for token in range(V)})
BAD = [math.nan, math.inf, -math.inf]
POLICIES = {
    "greedy": Policy(),
    "rejection": Policy(make_sampler(1e-6)),
    "coupled": Policy(make_sampler(1e-6), seed=1),
    "processors": Policy(processors=make_logits_processors(repetition_penalty=1.0)),
    "a sampler": Policy(lambda logprobs: mx.argmax(logprobs, axis=-1)),
    "a picky sampler": Policy(picky),
    "repairs": Policy(processors=[lambda tokens, logits: mx.nan_to_num(logits, posinf=0, neginf=0)]),
}


# A processor may make something of a row of which nothing is left.
@pytest.mark.parametrize("policy, value", [*itertools.product(POLICIES, BAD)][:-1])
@pytest.mark.parametrize("index", [0, 3, 5])
def test_bad_logits_are_an_error_with_their_position_after_all_that_came_before(policy, value, index):
    at = len(PROMPT) + index
    run = Run(TableTarget(spoilt={at: value})).start(policy=POLICIES[policy], drafter=drafter(), width=4)
    with pytest.raises(RuntimeError, match=f"logits for token {at} are NaN or infinite") as raised:
        run.take()
    assert ("target's" in str(raised.value)) == (policy != "processors" or value != -math.inf)
    assert run.given == TEXT[len(PROMPT) : at]
    run.target.spoilt = {}
    text = run.conversation.tokens + [8]
    run.start(prompt=[8], max_tokens=5)
    assert run.take() == oracle(text, 5)


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("sampler", [None, make_sampler(1e-6), picky], ids=["greedy", "sampled", "picky"])
def test_logits_that_processors_spoil_are_an_error_with_their_position(value, sampler):
    at = len(PROMPT) + 3
    for only in (None, 5) if value != -math.inf else (None,):
        policy = Policy(sampler, [spoils(at, value, only)])
        run = Run().start(policy=policy, drafter=drafter(), width=4)
        with pytest.raises(RuntimeError, match=f"^the logits for token {at} are NaN or infinite after the logits proc"):
            run.take()
        assert run.given == TEXT[len(PROMPT) : at]
    run = Run().start(policy=Policy(sampler, NOTHING), drafter=drafter(), width=4)
    with pytest.raises(RuntimeError, match=f"^the logits for token {len(PROMPT)} are NaN or infinite after the logits"):
        run.take()
    # One of them is no fault.
    assert Run().start(policy=Policy(sampler, [spoils(at, -math.inf, TEXT[at] ^ 1)])).take(5) == TEXT[len(PROMPT) :][:5]


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
