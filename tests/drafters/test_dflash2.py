"""DFlash 2's path through its candidates, against enumeration and the formulas."""

import itertools

import mlx.core as mx
import numpy as np
import pytest
from drafter_kit import HIDDEN, VOCAB, Greedy, golden_drafter

from specmlx.decoding.policy import Policy
from specmlx.decoding.sampling import make_sampler
from specmlx.kernels.draft_head import best_path


class AsIs(Greedy):
    greedy = True


def observed(drafter):
    context = drafter.new_context()
    rows = mx.random.normal((1, 9, 2 * HIDDEN), key=mx.random.key(0))
    drafter.observe(context, mx.zeros((1, 9), dtype=mx.int32), rows, 9)
    return context


def anchor(token: int) -> mx.array:
    return mx.array([token], dtype=mx.int32)


def scores(drafter, token: int):
    """S_t(b | a) as a function of t, a and b; and each slot's candidates."""
    selector = drafter.model.candidate_selector
    hidden = drafter.slots_hidden(observed(drafter), anchor(token), drafter.max_width)
    U = np.array(drafter.logits(hidden)[0], np.float64)
    z = np.array(selector.hidden_projection(hidden)[0], np.float64)
    A, B = (np.array(x, np.float64) for x in (selector.predecessor_codebook, selector.successor_codebook))
    return lambda t, a, b: U[t, b] + (A[a] * z[t] * B[b]).sum(), np.argsort(-U)[:, : selector.top_k]


def expected_length(tables: np.ndarray, path) -> float:
    """How many tokens of a path of candidates are expected to be kept."""
    total, kept, before = 0.0, 1.0, 0
    for t, b in enumerate(path):
        row = np.exp(tables[t, before])
        kept *= row[b] / row.sum()
        total += kept
        before = b
    return total


def test_no_path_is_expected_to_keep_more_than_the_best_path():
    tables = 2 * np.random.default_rng(0).normal(size=(3, 5, 4, 4)).astype(np.float32)
    found = best_path(mx.array(tables)).tolist()
    greedy_is_best = 0
    for lane, path in enumerate(found):
        by_length = {p: expected_length(tables[lane], p) for p in itertools.product(range(4), repeat=5)}
        assert expected_length(tables[lane], path) == pytest.approx(max(by_length.values()), rel=1e-6)
        walk, before = [], 0
        for t in range(5):
            before = int(tables[lane, t, before].argmax())
            walk.append(before)
        greedy_is_best += walk == path
    assert greedy_is_best < 3


def test_a_greedy_lane_gets_the_best_path_of_the_formulas_scores():
    drafter = golden_drafter("dflash2_full")
    for token in range(12):
        S, candidates = scores(drafter, token)
        K = candidates.shape[1]
        before = np.concatenate([np.full((1, K), token), candidates[:-1]])
        tables = [[[S(t, a, b) for b in candidates[t]] for a in before[t]] for t in range(7)]
        path = best_path(mx.array(np.array(tables, np.float32))[None])[0].tolist()
        proposal = drafter.propose(observed(drafter), anchor(token), 7, AsIs())
        assert proposal.tokens[0].tolist() == [candidates[t][i] for t, i in enumerate(path)]
        assert proposal.q is None


def test_a_walk_shows_each_slots_candidates_after_the_token_that_was_drawn():
    drafter = golden_drafter("dflash2_full")
    S, candidates = scores(drafter, 5)
    drawn = [int(candidates[t][(3 * t + 1) % 8]) for t in range(7)]

    class Scripted(Greedy):
        def draft(self, logits, slot):
            super().draft(logits, slot)
            return mx.array([[drawn[slot]]], dtype=mx.int32), mx.softmax(logits, axis=-1)

    policy = Scripted()
    proposal = drafter.propose(observed(drafter), anchor(5), 7, policy)
    assert proposal.tokens[0].tolist() == drawn
    for t, before in enumerate([5, *drawn[:-1]]):
        wanted = np.full(VOCAB, -np.inf)
        wanted[candidates[t]] = [S(t, before, b) for b in candidates[t]]
        np.testing.assert_allclose(np.array(policy.logits[0, t]), wanted, atol=2e-5)
        q = np.exp(wanted - wanted.max())
        np.testing.assert_allclose(np.array(proposal.q[0, t]), q / q.sum(), atol=2e-5)


@pytest.mark.parametrize("top_k", [0, 3, 20])
def test_a_sampled_walk_draws_candidates_with_a_q_that_is_a_distribution(top_k):
    drafter = golden_drafter("dflash2_sliding")
    policy = Policy(make_sampler(temp=0.9, top_p=0.95, min_p=0.01, top_k=top_k), None, None).at(10)
    proposal = drafter.propose(observed(drafter), anchor(5), 7, policy)
    drawn = mx.take_along_axis(proposal.q, proposal.tokens[..., None], axis=-1)
    assert mx.all(drawn > 0).item()
    assert mx.allclose(proposal.q.sum(axis=-1), mx.ones((1, 7))).item()
    assert mx.all((proposal.q > 0).sum(axis=-1) <= 8).item()


def test_scores_are_float32_where_the_weights_are_not():
    drafter = golden_drafter("dflash2_full")
    drafter.model.set_dtype(mx.bfloat16)
    selector = drafter.model.candidate_selector
    hidden = mx.random.normal((1, 7, HIDDEN)).astype(mx.bfloat16)
    unary, ids = selector.candidates(drafter.logits(hidden).astype(mx.bfloat16))
    assert selector.scores(hidden, unary, ids, ids).dtype == unary.dtype == mx.float32


def test_a_policy_is_greedy_only_where_a_token_is_the_argmax_of_the_logits():
    def bias(tokens, logits):
        return logits

    assert Policy().at(3).greedy
    assert not Policy(None, [bias]).at(3).greedy
    assert not Policy(make_sampler(temp=0.5)).at(3).greedy
    assert not Policy(make_sampler(temp=0.5), None, 7).at(3).greedy
