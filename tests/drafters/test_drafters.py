"""The block drafters by themselves: what sees what, what is remembered, what is shared."""

from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest
from drafter_kit import HIDDEN, MASK, VOCAB, WINDOW, Greedy, golden_drafter
from mlx.utils import tree_flatten, tree_unflatten

from specmlx.drafters.block import BlockTrunk
from specmlx.drafters.block_drafter import SLACK
from specmlx.drafters.config import DrafterConfig
from specmlx.drafters.proposal import DraftPolicy

F = 2 * HIDDEN
KINDS = ["dflash_sliding", "dflash_sliding_bidirectional", "dflash_full", "dflash2_sliding", "dspark"]


def features(rows: int, lanes: int = 1, seed: int = 0) -> mx.array:
    return mx.random.normal((lanes, rows, F), key=mx.random.key(seed))


def anchors(*ids: int) -> mx.array:
    return mx.array(ids, dtype=mx.int32)


def observe(drafter, context, rows, count=None):
    tokens = mx.zeros(rows.shape[:2], dtype=mx.int32)
    drafter.observe(context, tokens, rows, rows.shape[1] if count is None else count)


def logits(drafter, context, anchor) -> mx.array:
    greedy = Greedy()
    drafter.propose(context, anchor, drafter.max_width, greedy)
    return greedy.logits


def close(a: mx.array, b: mx.array, atol: float = 2e-5) -> bool:
    return mx.allclose(a, b, rtol=0, atol=atol).item()


def from_scratch(drafter, rows: mx.array, anchor: mx.array, start: int = 0) -> mx.array:
    """The block's normed rows by `BlockTrunk.hidden`, which keeps nothing: all the context's taps at once."""
    R, S = drafter.config.block_size, rows.shape[1]
    positions = start + mx.arange(S + R, dtype=mx.int32)[None]
    everything = mx.ones((1, 1, R, S + R), dtype=mx.bool_)
    embeddings = drafter.block_embeddings(anchor)
    return drafter.model.hidden(embeddings, positions[:, S:], rows, positions[:, :S], everything)


def tiny_trunk(window: int | None, is_causal: bool) -> BlockTrunk:
    """One layer, so that what a row attends to is all that it depends on."""
    mx.random.seed(3)
    config = SimpleNamespace(**vars(golden_drafter("dflash_full").config))
    config.num_hidden_layers, config.windows, config.is_causal = 1, (window,), is_causal
    return BlockTrunk(DrafterConfig(**vars(config)))


# Slots and widths


def test_block_size_means_one_proposal_less_in_dflash_and_as_many_in_dspark():
    dflash, dspark = golden_drafter("dflash_full"), golden_drafter("dspark")
    assert (dflash.config.block_size, dflash.max_width) == (8, 7)
    assert (dspark.config.block_size, dspark.max_width) == (7, 7)


@pytest.mark.parametrize("case", KINDS)
def test_a_narrow_proposal_is_the_beginning_of_a_wide_one(case):
    drafter = golden_drafter(case)
    context = drafter.new_context()
    observe(drafter, context, features(9))
    wide = drafter.propose(context, anchors(5), drafter.max_width, Greedy()).tokens
    for width in range(drafter.max_width + 1):
        narrow = drafter.propose(context, anchors(5), width, Greedy()).tokens
        assert narrow.dtype == mx.int32
        assert narrow.tolist() == wide[:, :width].tolist()
    with pytest.raises(ValueError, match="num_draft_tokens is 8: this drafter proposes 0 to 7"):
        drafter.propose(context, anchors(5), 8, Greedy())


def test_dsparks_logits_are_the_heads_plus_the_bias_of_the_token_drawn_before():
    drafter = golden_drafter("dspark")
    context = drafter.new_context()
    observe(drafter, context, features(9))
    drawn = [11, 70, 3, 3, 50, 95, 1]
    shown = []

    class Scripted(DraftPolicy):
        greedy = False

        def draft(self, logits, slot):
            shown.append(logits[0, 0])
            return mx.array([[drawn[slot]]], dtype=mx.int32), mx.full(logits.shape, slot, dtype=mx.float32)

    proposal = drafter.propose(context, anchors(5), 7, Scripted())
    base = drafter.logits(drafter.block_hidden(context, anchors(5)))[0]
    head = drafter.model.markov_head
    for slot, previous in enumerate([5, *drawn[:-1]]):
        bias = head.markov_w2.weight @ head.markov_w1.weight[previous]
        assert close(shown[slot], base[slot] + bias)
    assert proposal.tokens.tolist() == [drawn]
    assert proposal.q.shape == (1, 7, VOCAB)
    assert proposal.q[0, :, 0].tolist() == list(range(7))


# What sees what


@pytest.mark.parametrize("is_causal", [True, False])
def test_the_window_is_counted_from_each_query_by_absolute_position(is_causal):
    trunk = tiny_trunk(WINDOW, is_causal)
    R, S = 8, 20
    positions = 1000 + mx.arange(S + R, dtype=mx.int32)[None]
    block, context = mx.random.normal((1, R, HIDDEN)), features(S)
    everything = mx.ones((1, 1, R, S + R), dtype=mx.bool_)

    def run(context):
        return trunk.hidden(block, positions[:, S:], context, positions[:, :S], everything)

    before = run(context)
    for c in range(S):
        changed = mx.array(context)
        changed[0, c] = 7.0
        moved = (mx.abs(run(changed) - before).max(axis=-1) > 1e-6)[0].tolist()
        assert moved == [S + i - c < WINDOW for i in range(R)], f"context row {c}"


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_causal_block_row_does_not_see_the_rows_after_it(is_causal):
    trunk = tiny_trunk(None, is_causal)
    R, S = 8, 5
    positions = mx.arange(S + R, dtype=mx.int32)[None]
    block, context = mx.random.normal((1, R, HIDDEN)), features(S)
    everything = mx.ones((1, 1, R, S + R), dtype=mx.bool_)

    def run(block):
        return trunk.hidden(block, positions[:, S:], context, positions[:, :S], everything)

    before = run(block)
    for j in range(R):
        changed = mx.array(block)
        changed[0, j] = 3 * changed[0, j] + 1
        moved = (mx.abs(run(changed) - before).max(axis=-1) > 1e-6)[0].tolist()
        assert moved == [i >= j or not is_causal for i in range(R)], f"block row {j}"


def test_the_block_is_raw_rows_of_the_targets_table_times_the_scale():
    drafter = golden_drafter("dflash_causal_scaled")
    table = drafter.target.embed_tokens.weight
    block = drafter.block_embeddings(anchors(5, 6))
    assert block.shape == (2, 8, HIDDEN)
    assert mx.array_equal(block[1, 0], 1.5 * table[6]).item()
    assert all(mx.array_equal(block[0, i], 1.5 * table[MASK]).item() for i in range(1, 8))


@pytest.mark.parametrize("case", ["dflash_full", "dflash2_full", "dspark"])
def test_every_tensor_changes_what_is_proposed(case):
    drafter = golden_drafter(case)

    def outcome():
        context, greedy = drafter.new_context(), Greedy()
        observe(drafter, context, features(9))
        confidence = drafter.propose(context, anchors(5), drafter.max_width, greedy).confidence
        return greedy.logits if confidence is None else mx.concatenate([greedy.logits, confidence[..., None]], axis=-1)

    def moved(after, before):
        # DFlash 2's logits are -inf but at its candidates.
        return mx.where(after == before, 0, mx.abs(after - before)).max().item()

    before = outcome()
    for tree in (drafter.model, drafter.target.embed_tokens, drafter.target.lm_head):
        for name, weight in tree_flatten(tree.parameters()):
            noise = 0.1 * mx.random.normal(weight.shape, key=mx.random.key(1))
            tree.update(tree_unflatten([(name, weight + noise)]))
            assert moved(outcome(), before) > 1e-4, name
            tree.update(tree_unflatten([(name, weight)]))
    assert mx.array_equal(outcome(), before).item()


# What is remembered


@pytest.mark.parametrize("case", KINDS)
def test_long_conversations_are_proposed_for_as_from_scratch_in_bounded_memory(case):
    drafter = golden_drafter(case)
    rows, start = features(700), 50
    context, seen = drafter.new_context(start=start), 0
    limit = 2 * (WINDOW + drafter.config.block_size) + SLACK + drafter.config.block_size
    for i, n in enumerate([40] + [1, 2, 8, 5] * 41):
        observe(drafter, context, rows[:, seen : seen + n], n if i % 3 else anchors(n))
        seen += n
        hidden = drafter.block_hidden(context, anchors(i % VOCAB))
        mx.eval(hidden, context.arrays())
        if i % 8 == 0 or seen % 256 < 12:
            assert close(hidden, from_scratch(drafter, rows[:, :seen], anchors(i % VOCAB), start)), seen
        for group in context.groups:
            assert (group.base + group.length).tolist() == [start + seen]
            if group.window:
                assert group.max_length <= limit
                assert all(kv.capacity <= limit + 256 for kv in group.kvs.values())
    assert seen > 2 * SLACK


@pytest.mark.parametrize("case", KINDS)
@pytest.mark.parametrize("step", [1, 7, 64])
def test_a_prompt_may_be_observed_in_any_steps(case, step):
    drafter, rows = golden_drafter(case), features(150)
    context = drafter.new_context()
    for i in range(0, 150, step):
        observe(drafter, context, rows[:, i : i + step])
        mx.eval(context.arrays())
    assert close(drafter.block_hidden(context, anchors(5)), from_scratch(drafter, rows, anchors(5)))


@pytest.mark.parametrize("case", KINDS)
def test_lanes_of_a_batch_keep_their_own_lengths(case):
    drafter, lanes = golden_drafter(case), 3
    rows = features(900, lanes, seed=2)
    context, seen = drafter.new_context(lanes), [0] * lanes
    steps = [[3, 0, 8], [1, 8, 2], [8, 8, 0], [8, 1, 1]] * 25
    for counts in steps:
        block = mx.stack([rows[lane, s : s + 8] for lane, s in enumerate(seen)])
        late = mx.arange(8)[None] >= anchors(*counts)[:, None]
        observe(drafter, context, mx.where(late[..., None], float("nan"), block), anchors(*counts))
        mx.eval(context.arrays())
        seen = [s + n for s, n in zip(seen, counts, strict=True)]
    hidden = drafter.block_hidden(context, anchors(1, 2, 3))
    for lane in range(lanes):
        alone = from_scratch(drafter, rows[lane : lane + 1, : seen[lane]], anchors(lane + 1))
        assert close(hidden[lane : lane + 1], alone), lane


@pytest.mark.parametrize("case", ["dflash_sliding", "dflash_sliding_bidirectional"])
def test_a_lane_that_takes_no_rows_keeps_its_window_while_old_rows_are_dropped(case):
    drafter, rows = golden_drafter(case), features(30)
    context, drops = drafter.new_context(), 0
    for i in range(0, 30, 5):
        observe(drafter, context, rows[:, i : i + 5])
    while drops < 2:
        max_length = context.groups[0].max_length
        observe(drafter, context, features(8), anchors(0))
        drops += context.groups[0].max_length < max_length
    assert close(drafter.block_hidden(context, anchors(5)), from_scratch(drafter, rows, anchors(5)))


def test_a_proposal_that_is_dropped_leaves_no_trace():
    drafter, rows = golden_drafter("dflash_sliding"), features(30)
    kept, clean = drafter.new_context(), drafter.new_context()
    for context in (kept, clean):
        observe(drafter, context, rows[:, :20])
    first = logits(drafter, kept, anchors(5))
    logits(drafter, kept, anchors(6))
    assert mx.array_equal(logits(drafter, kept, anchors(5)), first).item()
    for context in (kept, clean):
        observe(drafter, context, rows[:, 20:23])
    assert mx.array_equal(logits(drafter, kept, anchors(7)), logits(drafter, clean, anchors(7))).item()


def test_two_conversations_share_a_drafter_that_remembers_neither():
    drafter, rows = golden_drafter("dspark"), features(40, 2)
    kept = dict(vars(drafter))
    contexts = [drafter.new_context(), drafter.new_context()]
    for i in range(0, 40, 4):
        for lane, context in enumerate(contexts):
            observe(drafter, context, rows[lane : lane + 1, i : i + 4])
            logits(drafter, context, anchors(i))
    for lane, context in enumerate(contexts):
        alone = drafter.new_context()
        observe(drafter, alone, rows[lane : lane + 1])
        assert close(logits(drafter, context, anchors(5)), logits(drafter, alone, anchors(5)), 1e-4)
    assert all(vars(drafter)[name] is value for name, value in kept.items())


def test_what_the_host_learns_of_unread_counts_shortens_the_buffers_that_are_read():
    drafter, rows = golden_drafter("dflash_full"), features(64)
    context = drafter.new_context()
    for i in range(8):
        observe(drafter, context, rows[:, i : i + 8], anchors(1))
        assert context.groups[0].max_length == i + 8
        before = drafter.block_hidden(context, anchors(5))
        context.settle(1)
        assert context.groups[0].max_length == i + 1
    assert close(drafter.block_hidden(context, anchors(5)), before)
    assert close(before, from_scratch(drafter, rows[:, :8], anchors(5)))


@pytest.mark.parametrize("case", ["dflash_full", "dflash_sliding", "dspark"])
def test_rows_of_the_last_pass_that_do_not_stay_are_forgotten(case):
    drafter, rows = golden_drafter(case), features(400)
    context = drafter.new_context()
    for i in range(0, 320, 8):
        # Shown with a count that nobody has read, and proposed from, before it is known that fewer stay.
        observe(drafter, context, rows[:, i : i + 16], anchors(16))
        logits(drafter, context, anchors(5))
        context.settle(12)
        context.settle(8)
    alone = drafter.new_context()
    observe(drafter, alone, rows[:, :320])
    assert (context.groups[0].base + context.groups[0].length).tolist() == [320]
    assert close(logits(drafter, context, anchors(5)), logits(drafter, alone, anchors(5)), 1e-4)


def test_nothing_is_evaluated_while_a_round_is_built():
    # While it traces, mlx refuses every evaluation. The error at the end spares the compilation.
    drafter = golden_drafter("dflash_sliding")

    class Built(Exception):
        pass

    def round(rows, counts):
        context = drafter.new_context(2)
        for _ in range(2):
            observe(drafter, context, rows, counts)
            tokens = drafter.propose(context, counts, 7, Greedy()).tokens
        raise Built(tokens.shape)

    mx.enable_compile()
    try:
        with pytest.raises(Built, match=r"\(2, 7\)"):
            mx.compile(round)(features(200, 2), anchors(3, 8))
    finally:
        mx.disable_compile()


@pytest.mark.parametrize("count", [-1, 9])
def test_observing_what_is_not_there_is_refused(count):
    drafter = golden_drafter("dflash_full")
    with pytest.raises(ValueError, match=f"can't observe {count} rows: there are 8"):
        observe(drafter, drafter.new_context(), features(8), count)
    with pytest.raises(ValueError, match="features are 64 wide: this drafter's are 128, the outputs of layers"):
        observe(drafter, drafter.new_context(), features(8)[..., :HIDDEN])


# What is shared


@pytest.mark.parametrize("case", ["dflash_full", "dspark"])
def test_the_targets_embedding_and_head_are_used_in_place(case):
    drafter = golden_drafter(case)
    assert not isinstance(drafter, nn.Module)
    names = [name for name, _ in tree_flatten(drafter.model.parameters())]
    assert not any("embed_tokens" in name or "lm_head" in name for name in names)
    context = drafter.new_context()
    observe(drafter, context, features(9))
    before = logits(drafter, context, anchors(5))
    drafter.target.lm_head.weight = 2 * drafter.target.lm_head.weight
    head = drafter.model.markov_head if case == "dspark" else None
    bias = head.markov_w2(head.markov_w1(anchors(5))) if head else 0
    assert close(logits(drafter, context, anchors(5))[:, 0] - bias, 2 * (before[:, 0] - bias))


@pytest.mark.parametrize("own", [mx.float16, mx.bfloat16])
def test_the_head_runs_in_the_targets_dtype_whatever_the_drafters_is(own):
    drafter = golden_drafter("dspark")
    drafter.model.set_dtype(own)
    asked, head = [], drafter.target.lm_head
    drafter.target.lm_head = lambda hidden: asked.append(hidden.dtype) or head(hidden)
    context = drafter.new_context()
    observe(drafter, context, features(9))
    proposal = drafter.propose(context, anchors(5), 7, Greedy())
    assert asked == [mx.float32]
    assert proposal.confidence.dtype == mx.float32
    reference = golden_drafter("dspark")
    context = reference.new_context()
    observe(reference, context, features(9))
    exact = reference.propose(context, anchors(5), 7, Greedy())
    assert mx.abs(proposal.confidence[:, 0] - exact.confidence[:, 0]).item() < 0.02


# Training


@pytest.mark.parametrize("case", ["dflash_sliding", "dflash2_sliding", "dspark"])
def test_packed_blocks_of_many_anchors_equal_their_proposals_one_by_one(case):
    drafter, rows = golden_drafter(case), features(40)
    R, S = drafter.config.block_size, 40
    at = mx.array([1, 7, 12, 30], dtype=mx.int32)
    tokens = mx.random.randint(0, VOCAB, (S,), key=mx.random.key(4)).astype(mx.int32)
    blocks = drafter.block_embeddings(tokens[at])
    positions = (at[:, None] + mx.arange(R, dtype=mx.int32)).reshape(1, -1)
    keys, owner = mx.arange(S, dtype=mx.int32)[None], mx.repeat(mx.arange(4), R)
    mask = mx.concatenate([keys < mx.repeat(at, R)[:, None], owner[:, None] == owner[None]], axis=1)
    packed = drafter.model.hidden(blocks.reshape(1, 4 * R, HIDDEN), positions, rows, keys, mask[None, None])
    for i, a in enumerate(at.tolist()):
        context = drafter.new_context()
        observe(drafter, context, rows[:, :a])
        alone = drafter.block_hidden(context, tokens[a : a + 1])
        assert close(packed[:, i * R : (i + 1) * R], alone), a


def test_a_training_pass_has_gradients_for_every_tensor_of_the_trunk():
    drafter, rows = golden_drafter("dflash_sliding"), features(20)

    def loss(trunk):
        positions = mx.arange(28, dtype=mx.int32)[None]
        mask = mx.ones((1, 1, 8, 28), dtype=mx.bool_)
        block = drafter.block_embeddings(anchors(5))
        hidden = trunk.hidden(block, positions[:, 20:], rows, positions[:, :20], mask)
        return drafter.logits(hidden).square().mean()

    gradients = tree_flatten(nn.value_and_grad(drafter.model, loss)(drafter.model)[1])
    assert len(gradients) == len(tree_flatten(drafter.model.parameters()))
    for name, gradient in gradients:
        assert mx.abs(gradient).max().item() > 0, name
