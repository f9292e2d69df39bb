"""Prompt lookup: against a naive search, and in the loop."""

import random

import mlx.core as mx
import pytest
from drafter_kit import Greedy
from rig import generate_tokens, tiny

from specmlx.cache.conversation import Conversation
from specmlx.decoding.policy import Policy
from specmlx.decoding.sampling import make_sampler
from specmlx.decoding.stats import Stats
from specmlx.drafters.ngram import NGram
from specmlx.drafters.proposal import Drafter
from specmlx.loading.load import load_drafter


def naive(text: list[int], width: int, longest: int) -> tuple[list[int], int]:
    """The continuation of the latest longest match of the text's end, and the match's length."""
    for n in range(min(longest, len(text) - 1), 0, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                rest = text[end:]
                return (rest * width)[:width], n
    return [], 0


def observed(drafter, text: list[int]):
    context = drafter.new_context()
    drafter.observe(context, mx.array([text], dtype=mx.int32), None, len(text))
    return context


def propose(drafter, context, anchor: int, width: int = 7):
    return drafter.propose(context, mx.array([anchor], dtype=mx.int32), width, Greedy())


def test_proposals_are_those_of_a_naive_search():
    rng, drafter, matches = random.Random(0), NGram(longest=4), 0
    for _ in range(200):
        text = [rng.randrange(6) for _ in range(rng.randrange(2, 40))]
        proposal = propose(drafter, observed(drafter, text[:-1]), text[-1])
        wanted, n = naive(text, 7, 4)
        assert proposal.confidence[0].tolist() == pytest.approx([n / (n + 1)] * 7)
        assert proposal.tokens.dtype == mx.int32
        if n:
            matches += 1
            assert proposal.tokens[0].tolist() == wanted, text
    assert 100 < matches < 200


def test_a_period_goes_on():
    drafter = NGram()
    proposal = propose(drafter, observed(drafter, [9, 1, 2, 3, 1, 2, 3, 1]), 2)
    assert proposal.tokens[0].tolist() == [3, 1, 2, 3, 1, 2, 3]


def test_lanes_with_unread_counts_are_as_each_alone_and_stale_tokens_never_match():
    drafter, rng = NGram(longest=4), random.Random(1)
    together, texts = drafter.new_context(3), [[], [], []]
    for _ in range(40):
        rows = [[rng.randrange(5) for _ in range(4)] for _ in range(3)]
        counts = [rng.randrange(1, 5) for _ in range(3)]
        drafter.observe(together, mx.array(rows, dtype=mx.int32), None, mx.array(counts, dtype=mx.int32))
        for text, row, count in zip(texts, rows, counts, strict=True):
            text += row[:count]
        proposal = drafter.propose(together, mx.array([1, 2, 3], dtype=mx.int32), 7, Greedy())
        for lane, text in enumerate(texts):
            wanted, n = naive([*text, lane + 1], 7, 4)
            assert not n or proposal.tokens[lane].tolist() == wanted


def test_contexts_settle_pack_join_and_part():
    drafter = NGram()
    context = drafter.new_context()
    drafter.observe(context, mx.array([[5, 6, 7, 8]], dtype=mx.int32), None, mx.array([4], dtype=mx.int32))
    drafter.observe(context, mx.array([[5, 9, 9, 9]], dtype=mx.int32), None, mx.array([3], dtype=mx.int32))
    context.settle(1)
    copy = drafter.new_context()
    copy.unpack(context.pack())
    joined = observed(drafter, [1, 2] * 200).joined([context])
    for same in (context, copy, joined.lanes([1])):
        assert propose(drafter, same, 6, 2).tokens.tolist() == [[7, 8]]
    both = drafter.propose(joined, mx.array([1, 6], dtype=mx.int32), 2, Greedy())
    assert both.tokens.tolist() == [[2, 1], [7, 8]]


def test_a_lane_that_observed_nothing_repeats_its_anchor_beside_others():
    drafter = NGram()
    joined = observed(drafter, [1, 2] * 200).joined([drafter.new_context()])
    both = drafter.propose(joined, mx.array([1, 6], dtype=mx.int32), 3, Greedy())
    assert both.tokens.tolist() == [[2, 1, 2], [6, 6, 6]]


def test_nothing_is_proposed_where_nothing_was_observed():
    drafter = load_drafter("ngram", tiny(3))
    assert isinstance(drafter, Drafter)
    assert propose(drafter, drafter.new_context(), 5).tokens.shape == (1, 0)
    with pytest.raises(ValueError, match="num_draft_tokens is 8: this drafter proposes 0 to 7"):
        propose(drafter, drafter.new_context(), 5, 8)
    with pytest.raises(ValueError, match="can't observe 3 rows: there are 1"):
        drafter.observe(drafter.new_context(), mx.array([[1]]), None, 3)


@pytest.mark.parametrize("seed", [None, 5])
def test_text_is_the_plain_text_and_repetitions_are_drafted(seed):
    target = tiny(3)
    policy = Policy(make_sampler(temp=0.7) if seed else None, None, seed)
    prompt, accepted = [3, 9, 4] * 6, []

    def text(drafter):
        stats = Stats()
        conversation = Conversation(target.new_states())
        tokens = generate_tokens(target, conversation, prompt, policy, drafter, max_tokens=60, stats=stats)
        ids = [token.id for token in tokens]
        accepted.append(stats.accepted)
        return ids

    assert text(NGram()) == text(None)
    assert accepted[0] > 0 or seed
