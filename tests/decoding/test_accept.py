"""Acceptance is exact: 200,000 draws against chi-square, and every branch of a 3-token model added up."""

import itertools
import threading
from functools import cache

import mlx.core as mx
import numpy as np
import pytest

from specmlx.decoding.accept import Outcome
from specmlx.decoding.policy import Policy
from specmlx.decoding.processors import make_logits_processors
from specmlx.decoding.sampling import make_sampler
from specmlx.kernels import accept

N, V = 200_000, 16
BOUND = 44.3  # chi-square with 15 degrees of freedom exceeds it once in 10,000
RNG = np.random.default_rng(3)
P = RNG.dirichlet(np.ones(V), size=3).astype(np.float32)  # one row for each of γ + 1 = 3 verified rows
Q = RNG.dirichlet(np.ones(V), size=2).astype(np.float32)


def accept_match(tokens, target_tokens):
    return Outcome(*accept.match(tokens, target_tokens))


def accept_rejection(tokens, q, p, u, noise):
    return Outcome(*accept.rejection(tokens, q, p, u, noise))


def each_lane(rows):
    return mx.broadcast_to(mx.array(rows), (N, *rows.shape))


def draws(rows, key):
    return mx.random.categorical(mx.log(each_lane(rows)), key=mx.random.key(key)).astype(mx.int32)


def randomness(width, vocab=V, key=1):
    u = mx.random.uniform(shape=(N, width), key=mx.random.key(key))
    return u, mx.random.gumbel((N, vocab), key=mx.random.key(key + 1))


@cache
def rejection(rule=accept_rejection):
    tokens = draws(Q, 10)
    return tokens, rule(tokens, each_lane(Q), each_lane(P), *randomness(2))


@cache
def point_mass():
    tokens = mx.stack([mx.arange(N) % V, mx.arange(N) // V % V], axis=1)
    return tokens, accept_rejection(tokens, None, each_lane(P), *randomness(2))


@cache
def match():
    tokens = draws(Q, 11)
    return tokens, accept_match(tokens, draws(P, 12))


@cache
def coupled():
    round_policy = Policy(make_sampler(temp=1.0), seed=5).at(mx.arange(N) * 3)
    tokens, q = round_policy.draft(mx.log(each_lane(Q)), 0)
    assert q is None
    return tokens, round_policy.accept(tokens, q, mx.log(each_lane(P)))[0]


def resample_from_p(tokens, q, p, u, noise):
    outcome = accept_rejection(tokens, q, p, u, noise)
    row = outcome.accepted[:, None, None]
    scores = mx.log(mx.take_along_axis(p, row, axis=1)[:, 0]) + noise
    return Outcome(outcome.accepted, mx.argmax(scores, axis=-1))


def argmax_on_rejection(tokens, q, p, u, noise):
    outcome = accept_rejection(tokens, q, p, u, noise)
    top = mx.take_along_axis(mx.argmax(p, axis=-1), outcome.accepted[:, None], axis=1)[:, 0]
    return Outcome(outcome.accepted, mx.where(outcome.accepted < 2, top, outcome.next_anchor))


def greedy_draft_as_sample():
    tokens = mx.argmax(each_lane(Q), axis=-1).astype(mx.int32)
    return tokens, accept_rejection(tokens, each_lane(Q), each_lane(P), *randomness(2))


def chi_squares(tokens, outcome, expected=P):
    """The statistic of the 1st, 2nd, ... delivered token, each over the lanes that delivered one."""
    tokens, accepted, following = (np.array(x) for x in (tokens, outcome.accepted, outcome.next_anchor))
    statistics = []
    for row, p in enumerate(expected):
        there = accepted >= row
        token = following[there]
        if row < tokens.shape[1]:
            token = np.where(accepted[there] > row, tokens[there, row], token)
        expected_counts = p.astype(np.float64) / p.sum(dtype=np.float64) * there.sum()
        counts = np.bincount(token, minlength=len(p))
        assert (counts[p == 0] == 0).all(), "a token without probability was delivered"
        there = p > 0
        statistics.append(float((((counts - expected_counts) ** 2)[there] / expected_counts[there]).sum()))
    return statistics


@pytest.mark.parametrize("rule", [rejection, point_mass, match, coupled])
def test_delivered_tokens_have_the_targets_distribution(rule):
    statistics = chi_squares(*rule())
    assert len(statistics) == 3 and max(statistics) < BOUND, statistics


@pytest.mark.parametrize(
    "wrong",
    [lambda: rejection(resample_from_p), lambda: rejection(argmax_on_rejection), greedy_draft_as_sample],
    ids=["resample from p", "argmax on rejection", "greedy draft as sample"],
)
def test_the_three_classic_wrong_rules_fail_the_same_test(wrong):
    assert chi_squares(*wrong())[0] > 20 * BOUND


def test_rejection_accepts_sum_of_min_p_q_and_independent_matching_only_sum_of_p_times_q():
    p, q = P[0].astype(np.float64), Q[0].astype(np.float64)
    rates = {rule: np.array(rule()[1].accepted >= 1).mean() for rule in (rejection, match, coupled)}
    assert abs(rates[rejection] - np.minimum(p, q).sum()) < 0.005
    assert abs(rates[match] - (p * q).sum()) < 0.005
    assert rates[match] + 0.1 < rates[coupled] < rates[rejection]


# Every branch of a 3-token model, with what the code does measured from outside.

TOKENS, WIDTH = 3, 2
PREFIXES = [x for n in range(3) for x in itertools.product(range(TOKENS), repeat=n)]
PROPOSALS = list(itertools.product(range(TOKENS), repeat=WIDTH))
LANES = [(prefix, proposal) for prefix in PREFIXES for proposal in PROPOSALS]


def tables():
    """Next-token distributions of target and drafter after every prefix, with zeros on either side."""
    rng = np.random.default_rng(8)
    p, q = {}, {}
    for n in range(5):
        for prefix in itertools.product(range(TOKENS), repeat=n):
            for table in (p, q):
                weights = rng.integers(0, 6, TOKENS).astype(np.float64) + [0, 1, 0]
                table[prefix] = (weights / weights.sum()).astype(np.float32)
            if rng.random() < 0.15:
                q[prefix] = p[prefix]
    return p, q


P_TABLE, Q_TABLE = tables()
LANE_P = mx.array(np.stack([[P_TABLE[x + y[:t]] for t in range(WIDTH + 1)] for x, y in LANES]))
LANE_Q = mx.array(np.stack([[Q_TABLE[x + y[:t]] for t in range(WIDTH)] for x, y in LANES]))
LANE_TOKENS = mx.array([y for _, y in LANES], dtype=mx.int32)


def bisect(holds, low, high):
    """Where `holds` [lanes] turns from True to False between low and high, float64."""
    low, high = np.full(len(LANES), low), np.full(len(LANES), high)
    for _ in range(36):
        middle = (low + high) / 2
        true = holds(middle)
        low, high = np.where(true, middle, low), np.where(true, high, middle)
    return low


def measure(rule, q):
    """(keep [lanes, γ], draw [lanes, γ + 1, V]) of a rejection rule, seen through its arguments alone.

    keep: the share of u for which a token is kept, those before it kept; draw: what noise is added to.
    """

    def call(u, noise):
        outcome = rule(LANE_TOKENS, q, LANE_P, mx.array(u), mx.array(noise))
        return np.array(outcome.accepted), np.array(outcome.next_anchor)

    keep = np.stack([share_kept(call, slot) for slot in range(WIDTH)], axis=1)
    return keep, np.stack([weights_drawn(call, slot) for slot in range(WIDTH + 1)], axis=1)


def share_kept(call, slot):
    u, noise = np.zeros((len(LANES), WIDTH)), np.zeros((len(LANES), TOKENS), np.float32)

    def kept(value):
        u[:, slot] = value
        return call(u.astype(np.float32), noise)[0] > slot

    # 1 - 2^-24 is the largest u there is.
    return np.where(kept(1 - 2**-24), 1.0, bisect(kept, 0.0, 1.0))


def weights_drawn(call, slot):
    u, lanes = np.zeros((len(LANES), WIDTH), np.float32), np.arange(len(LANES))
    u[:, slot:] = 1
    likely = call(u, np.zeros((len(LANES), TOKENS), np.float32))[1]
    weights = np.ones((len(LANES), TOKENS))
    for other in (1, 2):
        token = (likely + other) % TOKENS

        def wins(value, token=token):
            noise = np.full((len(LANES), TOKENS), -np.inf, np.float32)
            noise[lanes, likely], noise[lanes, token] = value, 0
            return call(u, noise)[1] == token

        # token wins while its log weight, less that of the likely one, is above the value.
        weights[lanes, token] = np.exp(bisect(wins, -40.0, 40.0))
    return weights / weights.sum(axis=-1, keepdims=True)


def texts(prefix, rounds):
    """The distribution of all 3-token texts; rounds(prefix) yields (probability, delivered tokens)."""
    if len(prefix) >= 3:
        return {prefix[:3]: 1.0}
    total = {}
    for probability, delivered in rounds(prefix):
        if probability > 0:
            for text, rest in texts(prefix + delivered, rounds).items():
                total[text] = total.get(text, 0.0) + probability * rest
    return total


def variation(got):
    want = {
        x: float(np.prod([np.float64(P_TABLE[x[:n]][x[n]]) for n in range(3)]))
        for x in itertools.product(range(TOKENS), repeat=3)
    }
    return sum(abs(got.get(x, 0.0) - want[x]) for x in want) / 2


def rejection_rounds(rule, q, proposed):
    """proposed(prefix) yields (probability, proposal)."""
    keep, draw = measure(rule, q)

    def rounds(prefix):
        for probability, proposal in proposed(prefix):
            lane = LANES.index((prefix, proposal))
            for slot in range(WIDTH + 1):
                kept = keep[lane, slot] if slot < WIDTH else 0.0
                for token in range(TOKENS):
                    yield probability * (1 - kept) * draw[lane, slot, token], (*proposal[:slot], token)
                probability *= kept

    return rounds


def sampled(prefix):
    for x in PROPOSALS:
        yield float(Q_TABLE[prefix][x[0]]) * float(Q_TABLE[(*prefix, x[0])][x[1]]), x


def test_enumerated_rejection_gives_the_models_own_texts():
    assert variation(texts((), rejection_rounds(accept_rejection, LANE_Q, sampled))) < 1e-6


def test_enumerated_point_mass_proposals_give_the_models_own_texts_whatever_is_proposed():
    for shift in range(3):
        rounds = rejection_rounds(
            accept_rejection, None, lambda x, shift=shift: [(1.0, ((len(x) + shift) % 3, sum(x, shift) % 3))]
        )
        assert variation(texts((), rounds)) < 1e-6


def test_enumerated_matching_gives_the_models_own_texts():
    lanes = [(lane, target) for lane in range(len(LANES)) for target in itertools.product(range(3), repeat=3)]
    tokens = mx.array([LANES[lane][1] for lane, _ in lanes])
    outcome = accept_match(tokens, mx.array([target for _, target in lanes]))
    results = list(zip(lanes, outcome.accepted.tolist(), outcome.next_anchor.tolist(), strict=True))
    by_prefix = {}
    for (lane, target), accepted, following in results:
        prefix, proposal = LANES[lane]
        rows = [P_TABLE[prefix + proposal[:t]] for t in range(3)]
        drawn = float(np.prod([np.float64(row[x]) for row, x in zip(rows, target, strict=True)]))
        by_prefix.setdefault(prefix, []).append((proposal, drawn, (*proposal[:accepted], following)))

    def rounds(prefix):
        proposed = {x: probability for probability, x in sampled(prefix)}
        for proposal, drawn, delivered in by_prefix[prefix]:
            yield proposed[proposal] * drawn, delivered

    assert variation(texts((), rounds)) < 1e-6


def test_enumeration_sees_a_wrong_residual():
    def wrong(tokens, q, p, u, noise):
        kept = accept_rejection(tokens, q, p, u, noise)
        scores = mx.log(p) + noise[:, None]
        row = mx.take_along_axis(mx.argmax(scores, axis=-1), kept.accepted[:, None], axis=1)[:, 0]
        return Outcome(kept.accepted, row)

    assert variation(texts((), rejection_rounds(wrong, LANE_Q, sampled))) > 1e-2


# Edges


def test_q_zero_accepts_p_zero_rejects_and_equal_distributions_keep_everything():
    p = mx.array([[[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]]])
    q = mx.array([[[0.0, 0.5, 0.5]]])
    noise = mx.zeros((1, 3))
    for token, u, accepted in [(0, 0.9999999, 1), (2, 0.0, 0), (1, 0.9999999, 1)]:
        outcome = accept_rejection(mx.array([[token]]), q, p, mx.array([[u]]), noise)
        assert outcome.accepted.tolist() == [accepted]
    # Nothing is left of p - q, and a rejection is forced: the draw comes from p, not from token 0 of nothing.
    p = mx.array([[[0.0, 0.25, 0.75], [1.0, 0.0, 0.0]]])
    outcome = accept_rejection(mx.array([[1]]), p[:, :1], p, mx.array([[1.0]]), noise)
    assert (outcome.accepted.item(), outcome.next_anchor.item()) == (0, 2)


def test_a_point_mass_that_is_rejected_is_not_drawn_again():
    p = mx.broadcast_to(mx.array([0.9, 0.06, 0.04]), (N, 2, 3))
    u, noise = randomness(1, vocab=3)
    outcome = accept_rejection(mx.zeros((N, 1), mx.int32), None, p, u, noise)
    rejected = np.array(outcome.next_anchor)[np.array(outcome.accepted) == 0]
    assert abs(len(rejected) / N - 0.1) < 0.003
    np.testing.assert_allclose(np.bincount(rejected, minlength=3) / len(rejected), [0, 0.6, 0.4], atol=0.015)


def test_without_a_proposal_the_token_is_the_targets():
    nothing = mx.zeros((3, 0), mx.int32)
    outcome = accept_match(nothing, mx.array([[4], [0], [7]], dtype=mx.uint32))
    assert (outcome.accepted.tolist(), outcome.next_anchor.tolist()) == ([0, 0, 0], [4, 0, 7])
    p = mx.array([[[0.2, 0.8]], [[1.0, 0.0]], [[0.5, 0.5]]])
    noise = mx.array([[0.0, 0.0], [0.0, 9.0], [0.1, 0.0]])
    for q in (None, mx.zeros((3, 0, 2))):
        outcome = accept_rejection(nothing, q, p, mx.zeros((3, 0)), noise)
        assert (outcome.accepted.tolist(), outcome.next_anchor.tolist()) == ([0, 0, 0], [1, 0, 0])
        assert outcome.accepted.dtype == outcome.next_anchor.dtype == mx.int32


def test_nan_behind_the_first_rejected_token_does_not_matter():
    lanes = 64
    tokens = draws(np.concatenate([Q, Q]), 20)[:lanes]
    q, p = (each_lane(np.concatenate([x[:2], x[:2], x[2:]]))[:lanes] for x in (Q, P))
    u, noise = (x[:lanes] for x in randomness(4))
    for proposed_q in (q, None):
        clean = accept_rejection(tokens, proposed_q, p, u, noise)
        behind = mx.arange(5) > clean.accepted[:, None]
        bad_p = mx.where(behind[..., None], mx.nan, p)
        bad_q = None if proposed_q is None else mx.where(behind[:, :4, None], mx.nan, q)
        poisoned = accept_rejection(tokens, bad_q, bad_p, mx.where(behind[:, :4], mx.nan, u), noise)
        for name in ("accepted", "next_anchor"):
            assert mx.array_equal(getattr(clean, name), getattr(poisoned, name))
        assert 0 < clean.accepted.max().item() and clean.accepted.min().item() < 4


def test_nothing_is_read_on_the_host():
    # An array of another thread's stream can be built on, and raises as soon as anybody looks.
    made = {}

    def make():
        with mx.stream(mx.new_stream(mx.cpu)):
            made["zero"] = mx.zeros(()) + mx.zeros((), mx.int32)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    zero = made["zero"]
    tokens, row = mx.zeros((2, 3), mx.int32) + zero.astype(mx.int32), mx.zeros((2, 4, 5)) + zero
    position = mx.zeros((2,), mx.int32) + zero.astype(mx.int32)
    outcomes = [accept_match(tokens, mx.zeros((2, 4), mx.int32))]
    for q in (None, row[:, :3]):
        outcomes.append(accept_rejection(tokens, q, row, row[:, :3, 0], row[:, 0]))
    sampler = make_sampler(temp=1.0, top_p=0.9, xtc_probability=0.5)
    processors = make_logits_processors({1: 1.0}, 1.1, 5, 0.2, 6, 0.3, 7)
    for policy in [Policy(), Policy(sampler), Policy(sampler, seed=7), Policy(sampler, processors)]:
        around = policy.at(position, tokens[0])
        drafted, q = around.draft(row[:, :3], 0)
        outcome, logprobs = around.accept(drafted, q, row)
        outcomes += [outcome, Outcome(drafted, logprobs)]
    for outcome in outcomes:
        for array in (outcome.accepted, outcome.next_anchor):
            with pytest.raises(RuntimeError, match="no Stream"):
                mx.eval(array)
