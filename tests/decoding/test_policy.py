"""Policies on a table model: one text a seed, mlx-lm's text with its callables, rejected tokens unseen."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import sample_utils

from specmlx.decoding.policy import Policies, Policy
from specmlx.decoding.processors import make_logits_processors
from specmlx.decoding.rng import Noise
from specmlx.decoding.sampling import make_sampler, normalise
from specmlx.drafters.proposal import among

V, WIDTH, LENGTH = 12, 4, 60
PROMPT = [3, 1, 4]
TABLE = np.random.default_rng(1).normal(size=(V, V, V)).astype(np.float32) * 2
PENALTIES = {
    "logit_bias": {2: 1.5, 5: -2.0},
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "presence_context_size": 3,
    "frequency_penalty": 0.2,
}
FILTERS = {"temp": 0.9, "top_p": 0.95, "top_k": 9, "xtc_probability": 0.3, "xtc_threshold": 0.1}


def target(text):
    """Next-token logits [V] after a text: a table over the last two tokens."""
    return TABLE[text[-2], text[-1]]


def good(text):
    return target(text) + np.sin(np.arange(V) + len(text))


def bad(text):
    return np.cos(np.arange(V) * len(text)) * 3


def write(policy, drafter=None, width=WIDTH, dtype=mx.float32, length=LENGTH, seen=None, lookback=True):
    """Tokens that the loop would deliver, and their logprobs; drafter(text) -> logits [V]."""
    text, logprobs, accepted = list(PROMPT), [], []
    while len(text) < len(PROMPT) + length:
        around = policy.at(len(text), text if lookback else None)
        drafted, q = [], []
        for slot in range(width if drafter else 0):
            logits = mx.array(drafter(text + drafted)).astype(dtype)[None, None]
            token, row = around.draft(logits, slot)
            assert (token.dtype, token.shape) == (mx.int32, (1, 1))
            drafted.append(token.item())
            q.append(row)
        rows = mx.array(np.stack([target(text + drafted[:t]) for t in range(len(drafted) + 1)])).astype(dtype)
        tokens = mx.array(drafted, dtype=mx.int32).reshape(1, -1)
        q = mx.concatenate(q, axis=1) if q and q[0] is not None else None
        outcome, row_logprobs = policy.at(len(text), text).accept(tokens, q, rows[None])
        n = outcome.accepted.item()
        assert row_logprobs.shape == (1, len(drafted) + 1, V) and outcome.next_anchor.dtype == mx.int32
        text += [*drafted[:n], outcome.next_anchor.item()]
        logprobs += [row_logprobs[0, t] for t in range(n + 1)]
        accepted.append(n)
    if seen is not None:
        seen += accepted
    return text[len(PROMPT) :][:length], logprobs[:length]


def mlx_lm_writes(sampler, processors, dtype=mx.float32):
    """mlx_lm.generate_step's decoding of the same table."""
    text, logprobs = list(PROMPT), []
    for _ in range(LENGTH):
        logits = mx.array(target(text))[None].astype(dtype)
        for processor in processors:
            logits = processor(mx.array(text), logits)
        logprobs.append(logits - mx.logsumexp(logits, keepdims=True))
        text.append(sampler(logprobs[-1]).item())
    return text[len(PROMPT) :], [row[0] for row in logprobs]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("settings", [{"temp": 1.0}, {"temp": 0.6, "min_p": 0.02}, FILTERS])
@pytest.mark.parametrize("penalties", [{}, PENALTIES])
def test_a_seed_gives_one_text_with_any_drafter_any_width_and_none(settings, penalties, dtype):
    def policy(seed):
        return Policy(make_sampler(**settings), make_logits_processors(**penalties), seed=seed)

    plain, logprobs = write(policy(7), dtype=dtype)
    # Plain decoding by the definition: argmax(log p + G) with the noise of the token's own index.
    noise, sampler = Noise(7), make_sampler(**settings)
    for n, token in enumerate(plain):
        index = mx.array([[len(PROMPT) + n]])
        log_p = sampler.log_probs(logprobs[n][None, None], noise.uniform("xtc", index))
        assert mx.argmax(log_p + noise.gumbel("token", index, V)).item() == token
    seen = []
    for drafter, width in [(target, 4), (good, 1), (good, 4), (bad, 3), (good, 7)]:
        assert write(policy(7), drafter, width, dtype, seen=seen)[0] == plain, (drafter, width)
    assert {0, 1, 2, 3, 4} <= set(seen)
    assert write(policy(8), good, dtype=dtype)[0] != plain


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("sampler", [None, make_sampler(), make_sampler(top_p=0.5)])
def test_greedy_text_and_logprobs_are_mlx_lms_bit_for_bit(sampler, dtype, bit_exact):
    for penalties in ({}, PENALTIES):
        want = mlx_lm_writes(sample_utils.greedy_sampler, sample_utils.make_logits_processors(**penalties), dtype)
        for drafter, width in [(None, 0), (target, 4), (good, 6), (bad, 2)]:
            policy = Policy(sampler, make_logits_processors(**penalties), seed=3)
            got = write(policy, drafter, width, dtype)
            assert got[0] == want[0] and policy.rule == "greedy"
            bit_exact(mx.stack(got[1]), mx.stack(want[1]))


def test_greedy_is_decided_where_mlx_lm_decides_it_on_rounded_log_probabilities():
    # Far from 0, bfloat16 log-probabilities are coarser than the logits: 1 and 1.0078 become one.
    logits = mx.array([[[1.0, 1.0078125, -9.0]]]).astype(mx.bfloat16)
    logits = mx.concatenate([logits, mx.full((1, 1, 3000), 0.9921875, mx.bfloat16)], axis=-1)
    assert mx.argmax(logits).item() == 1
    outcome, logprobs = Policy().at(0).accept(mx.zeros((1, 0), mx.int32), None, logits)
    row = logits[0, 0][None]
    want = sample_utils.greedy_sampler(row - mx.logsumexp(row, keepdims=True)).item()
    assert outcome.next_anchor.item() == want == 0


@pytest.mark.parametrize("temp", [0.6, 1.4])
def test_unseeded_policies_deliver_the_filtered_tempered_distribution(temp):
    lanes, p_logits, q_logits = 200_000, target([0, 1]), good([0, 1])
    policy = Policy(make_sampler(temp=temp, top_p=0.9, min_p=0.01, top_k=8))
    policy.noise = Noise(5)
    assert policy.rule == "rejection" and policy.reason is None and not policy.sequential
    around = policy.at(mx.arange(lanes) * 2)
    tokens, q = around.draft(mx.broadcast_to(mx.array(q_logits), (lanes, 1, V)), 0)
    outcome, _ = around.accept(tokens, q, mx.broadcast_to(mx.array(p_logits), (lanes, 2, V)))
    accepted = np.array(outcome.accepted)
    first = np.where(accepted == 1, np.array(tokens[:, 0]), np.array(outcome.next_anchor))
    bonus = np.array(outcome.next_anchor)[accepted == 1]

    def filtered(logits):
        x = normalise(mx.array(logits)[None])
        x = sample_utils.apply_top_k(sample_utils.apply_min_p(sample_utils.apply_top_p(x, 0.9), 0.01), 8)
        weights = np.exp(np.array(x[0], dtype=np.float64) / temp)
        return weights / weights.sum()

    p, q = filtered(p_logits), filtered(q_logits)
    assert (p == 0).sum() >= 4 and ((p == 0) != (q == 0)).any()
    for drawn in (first, bonus):
        counts, there = np.bincount(drawn, minlength=V), p > 0
        assert counts[~there].sum() == 0
        assert (((counts - p * len(drawn)) ** 2)[there] / (p * len(drawn))[there]).sum() < 35
    assert abs(accepted.mean() - np.minimum(p, q).sum()) < 0.005


@pytest.mark.parametrize("settings", [{"temp": 0.8}, {"temp": 1.2, "top_p": 0.9, "xtc_probability": 0.5}])
@pytest.mark.parametrize("penalties", [{}, PENALTIES])
def test_mlx_lms_sampler_draws_mlx_lms_text_whatever_is_drafted(settings, penalties):
    sampler = sample_utils.make_sampler(**settings)
    mx.random.seed(4)
    want = mlx_lm_writes(sampler, sample_utils.make_logits_processors(**penalties))
    seen = []
    for make in (make_logits_processors, sample_utils.make_logits_processors):
        for drafter, width in [(None, 0), (target, 4), (good, 5), (bad, 2)]:
            policy = Policy(sampler, make(**penalties))
            mx.random.seed(4)
            got = write(policy, drafter, width, seen=seen)
            assert got[0] == want[0], (make.__module__, drafter, width)
            assert mx.array_equal(mx.stack(got[1]), mx.stack(want[1]))
            assert policy.sequential and "one by one" in policy.reason and policy.rule == "sampler-match"
    assert {0, 1, 2, 3} <= set(seen)


def test_a_foreign_processor_sees_accepted_text_only_each_row_once_and_in_order():
    calls = []

    def counting(tokens, logits):
        assert tokens.dtype == mx.int32 and logits.shape == (1, V)
        calls.append(tokens.tolist())
        logits[:, len(calls) % V] = -float("inf")  # stateful, and in place
        return logits

    ours = make_logits_processors(repetition_penalty=1.4)
    theirs = sample_utils.make_logits_processors(repetition_penalty=1.4)
    for sampler, seed in [(None, None), (make_sampler(temp=0.8), 7)]:
        texts = []
        for drafter, width in [(None, 0), (target, 4), (good, 3), (bad, 2)]:
            for around in (ours, theirs):
                calls.clear()
                policy = Policy(sampler, [*around, counting, *around], seed=seed)
                text, _ = write(policy, drafter, width)
                whole = PROMPT + text
                assert calls[:LENGTH] == [whole[: len(PROMPT) + n] for n in range(LENGTH)]
                assert all(token != (n + 1) % V for n, token in enumerate(text))
                assert policy.sequential and "logits processor" in policy.reason
                texts.append(text)
        assert all(text == texts[0] for text in texts)


def test_a_seeds_text_is_the_same_with_our_penalties_and_mlx_lms():
    texts = [
        write(Policy(make_sampler(**FILTERS), make(**PENALTIES), seed=11), good)[0]
        for make in (make_logits_processors, sample_utils.make_logits_processors)
    ]
    assert texts[0] == texts[1]


def test_rows_that_a_sequential_policy_did_not_reach_are_nan_and_the_targets_logits_stay_as_they_were():
    def in_place(tokens, logits):
        assert mx.min(tokens).item() >= 0  # no padding
        logits[:] = mx.arange(V, dtype=mx.float32)
        return logits

    logits = mx.random.normal((2, 3, V), key=mx.random.key(1))
    before = logits + 0
    drafted = mx.array([[0, 1], [V - 1, 2]])
    outcome, logprobs = Policies([Policy(None, [in_place])] * 2).at([1, 2], [[4], [5, 6]]).accept(drafted, None, logits)
    assert (outcome.accepted.tolist(), outcome.next_anchor.tolist()) == ([0, 1], [V - 1, V - 1])
    assert mx.isnan(logprobs).all(axis=-1).tolist() == [[False, True, True], [False, False, True]]
    assert mx.array_equal(logits, before)


@pytest.mark.parametrize("sampler, seed", [(None, None), (make_sampler(**FILTERS), 5), (make_sampler(temp=1.0), None)])
def test_nan_rows_behind_the_accepted_ones_change_nothing(sampler, seed):
    policy = Policy(sampler, make_logits_processors(**PENALTIES), seed=seed)
    lanes, history = 30, [1, 2, 3, 2]
    around = policy.at(mx.arange(lanes) * 9, history)
    logits = mx.random.normal((lanes, 5, V), key=mx.random.key(6)) * 2
    tokens, q = around.draft(logits[:, :4] + mx.random.normal((lanes, 4, V), key=mx.random.key(7)), 0)
    clean, logprobs = around.accept(tokens, q, logits)
    behind = (mx.arange(5) > clean.accepted[:, None])[..., None]
    poisoned_q = None if q is None else mx.where(behind[:, :4], mx.nan, q)
    poisoned, others = around.accept(tokens, poisoned_q, mx.where(behind, mx.nan, logits))
    assert mx.array_equal(clean.accepted, poisoned.accepted)
    assert mx.array_equal(clean.next_anchor, poisoned.next_anchor)
    assert mx.array_equal(mx.where(behind, 0, logprobs), mx.where(behind, 0, others))
    assert len(set(clean.accepted.tolist())) > 2


def test_lanes_with_their_own_seed_history_and_position_equal_each_lane_alone():
    logits = mx.random.normal((2, 4, V), key=mx.random.key(8)) * 2
    seeds, positions, histories = [7, 8], [5, 30], [[1, 2], [4, 4, 4]]
    for last in ([], [lambda tokens, logits: logits]):
        processors = [*make_logits_processors(**PENALTIES), *last]
        if last:
            policies = [Policy(make_sampler(**FILTERS), processors, seed=seed) for seed in seeds]
            around = Policies(policies).at(positions, histories)
        else:
            policy = Policy(make_sampler(**FILTERS), processors, seed=seeds)
            around = policy.at(mx.array(positions), mx.array([[-1, 1, 2], [4, 4, 4]]))
        tokens, q = around.draft(logits[:, :3], 0)
        together, _ = around.accept(tokens, q, logits)
        for lane in range(2):
            one = Policy(make_sampler(**FILTERS), processors, seed=seeds[lane]).at(positions[lane], histories[lane])
            alone, q = one.draft(logits[lane : lane + 1, :3], 0)
            assert alone.tolist()[0] == tokens[lane].tolist()
            outcome, _ = one.accept(alone, q, logits[lane : lane + 1])
            assert outcome.accepted.item() == together.accepted[lane].item()
            assert outcome.next_anchor.item() == together.next_anchor[lane].item()


def test_drafts_follow_bias_and_penalties_as_far_as_the_text_is_known():
    flat = mx.zeros((1, 2, V))
    banned = make_logits_processors({n: -float("inf") for n in range(V) if n != 6})
    assert Policy(None, banned).at(0).draft(flat, 0)[0].tolist() == [[6, 6]]
    assert Policy(make_sampler(temp=1.0), banned).at(0).draft(flat, 0)[1][0, :, 6].tolist() == [1, 1]
    penalty = make_logits_processors(presence_penalty=1.0)
    assert Policy(None, penalty).at(2, [0, 1]).draft(flat, 0)[0].tolist() == [[2, 2]]
    assert Policy(None, penalty).at(2).draft(flat, 0)[0].tolist() == [[0, 0]]


def test_more_is_accepted_when_drafts_are_penalised_too():
    rates = []
    for lookback in (True, False):
        seen = []
        write(
            Policy(None, make_logits_processors(**PENALTIES)),
            target,
            1,
            length=300,
            seen=seen,
            lookback=lookback,
        )
        rates.append(np.mean(seen))
    assert rates[0] > 0.95 and rates[0] > rates[1] + 0.1, rates


def test_what_cannot_be_honoured_is_refused_in_one_line():
    foreign = sample_utils.make_sampler(temp=0.5)
    nothing, logits = mx.zeros((1, 0), mx.int32), mx.zeros((1, 1, V))
    penalties = make_logits_processors(repetition_penalty=1.1)
    for make, named in [
        (lambda: Policy(foreign, seed=7), "seed=7 .*make_sampler"),
        (lambda: Policy(sampler=0.7), "sampler must be callable, got 0.7"),
        (lambda: Policy(processors=5), "logits_processors must be a list, got 5"),
        (lambda: Policy(processors=[None]), "logits_processors must be callable, got None"),
        (lambda: Policy(seed=True), "seed is True: it must be an integer"),
        (lambda: Policy().at(0).accept(mx.zeros((1, 2), mx.int32), None, logits), "1 rows for 2 tokens"),
        (lambda: Policy(None, penalties).at(0).accept(nothing, None, logits), "history="),
        (
            lambda: Policy(None, [lambda tokens, x: None]).at(0, [1]).accept(nothing, None, logits),
            r"logits_processors\[0\] .*NoneType",
        ),
        (
            lambda: Policy(None, [*penalties, lambda tokens, x: x[0]]).at(0, [1]).accept(nothing, None, logits),
            r"logits_processors\[1\] ",
        ),
        (lambda: Policy(lambda x: mx.array([V])).at(0).accept(nothing, None, logits), f"0..{V - 1}, got {V}"),
        (lambda: Policy(lambda x: x).at(0).accept(nothing, None, logits), "one token id"),
    ]:
        with pytest.raises(ValueError, match=named) as error:
            make()
        assert "\n" not in str(error.value)


SAMPLERS = [make_sampler(temp=0.7), make_sampler(temp=0.7, top_p=0.8, min_p=0.02, top_k=9)]


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("sampler", SAMPLERS, ids=["temperature", "filters"])
def test_draws_made_by_other_means_are_those_of_draft(sampler, seed):
    policy = Policy(sampler, None, seed).at(mx.array([4, 9]))
    logits = 3 * mx.random.normal((2, 5, 40), key=mx.random.key(1))
    ids = mx.argsort(-logits, axis=-1)[..., :6].astype(mx.int32)
    scores = mx.take_along_axis(logits, ids, axis=-1)
    tokens, q = policy.draft(among(scores, ids, 40), 0)
    few, few_q = policy.draft_among(scores, ids, 0, 40)
    assert few.tolist() == tokens.tolist()
    assert (q is None) == (few_q is None) == (seed is not None)
    assert q is None or mx.allclose(few_q, q, atol=1e-6).item()
    draws = policy.draws(2, 5, 40)
    assert (draws is None) == sampler.filters
    if draws is not None:
        tokens, q = policy.draft(logits, 0)
        assert mx.argmax(logits * draws.scale + draws.noise, axis=-1).tolist() == tokens.tolist()
        assert q is None or mx.allclose(draws.q(logits), q, atol=1e-6).item()


def test_draws_leave_processors_and_others_samplers_to_draft():
    bias = make_logits_processors(logit_bias={3: 1.0})
    assert Policy(make_sampler(temp=0.7), bias).at(3).draws(1, 2, 40) is None
    assert Policy(lambda logprobs: mx.argmax(logprobs, axis=-1)).at(3).draws(1, 2, 40).noise is None
    assert not Policy().at(3).draws(1, 2, 40).sampled


@pytest.mark.parametrize("top_p", [0.0, 0.6, 0.95])
@pytest.mark.parametrize("top_k", [1, 9, 32])
def test_a_draft_among_the_best_has_the_filters_of_the_whole_vocabulary(top_k, top_p):
    policy = Policy(make_sampler(temp=0.7, top_p=top_p, min_p=0.01, top_k=top_k))
    logits = 2 * mx.random.normal((2, 5, 300), key=mx.random.key(top_k))
    tokens, q = policy.at(mx.array([4, 9])).draft(logits, 0)
    want = mx.exp(policy.log_probs(normalise(logits), mx.zeros((2, 5), dtype=mx.int32)))
    assert mx.allclose(q, want, atol=1e-6).item()
    assert mx.all(mx.take_along_axis(q, tokens[..., None], axis=-1) > 0).item()
