"""The acceptance kernels, their Metal source run on the CPU, against the rules as they read."""

import mlx.core as mx
import pytest
from msl import Simulator
from rig import serve

from specmlx.kernels import accept
from specmlx.kernels.accept import reference

SIMULATOR = Simulator()
FACTORY = SIMULATOR.metal_kernel


@pytest.fixture(autouse=True)
def served(monkeypatch):
    serve(monkeypatch, FACTORY)


# Every width from 0 to 16, and the longest; vocabularies of one segment and of three, a multiple of four and not.
WIDTHS = [(0, 40), (1, 8), (7, 1001), (16, 20000), *((width, 33) for width in (*range(2, 7), *range(8, 16), 31))]


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def proposal(own: mx.array, agree: list[int]) -> mx.array:
    """Tokens `[B, γ]` that equal the target's own up to `agree[b]`, and are others behind."""
    width = own.shape[1] - 1
    return mx.where(mx.arange(width) < mx.array(agree)[:, None], own[:, :-1], own[:, :-1] ^ 1).astype(mx.int32)


def assert_same(got, want):
    assert [x.tolist() for x in got] == [x.tolist() for x in want]


@pytest.mark.parametrize("width, vocab", WIDTHS)
@pytest.mark.parametrize("noisy", [False, True])
def test_greedy_and_coupled_keep_what_equals_the_targets_own_tokens(width, vocab, noisy):
    B = 3
    # Many equal scores: the first of the best ones counts.
    scores = mx.floor(normal(B, width + 1, vocab)).astype(mx.bfloat16)
    noise = normal(B, width + 1, vocab, seed=1) if noisy else None
    own = mx.argmax(scores if noise is None else scores + noise, axis=-1)
    agree = [0, width, width // 2]
    tokens = proposal(own, agree)
    want = reference.match(tokens, own)
    assert want[0].tolist() == agree
    # What lies behind the first refused token never matters.
    late = mx.arange(width + 1) > mx.array(agree)[:, None]
    scores = mx.where(late[..., None], mx.nan, scores).astype(mx.bfloat16)
    assert_same(accept.match_best(tokens, scores, noise), want)


@pytest.mark.parametrize("width, vocab", WIDTHS)
@pytest.mark.parametrize("sampled", [False, True])
def test_rejection_keeps_and_draws_as_the_rule_reads(width, vocab, sampled):
    B = 4
    p, q = (mx.softmax(2 * normal(B, width + 1, vocab, seed=seed), axis=-1) for seed in (1, 2))
    q = q[:, :width]
    q[0] = p[0, :width]
    tokens = mx.argmax(q, axis=-1).astype(mx.int32) if width else mx.zeros((B, 0), dtype=mx.int32)
    u = mx.random.uniform(shape=(B, width), key=mx.random.key(3))
    noise = mx.random.gumbel((B, vocab), key=mx.random.key(4))
    given = q if sampled else None
    want = reference.rejection(tokens, given, p, u, noise)
    late = mx.arange(width + 1) > want[0][:, None]
    p = mx.where(late[..., None], mx.nan, p)
    assert_same(accept.rejection(tokens, given, p, u, noise), want)


def test_a_refused_row_without_residual_is_drawn_from_p():
    p = mx.softmax(normal(1, 2, 40), axis=-1)
    tokens, u, noise = mx.array([[3]]), mx.array([[1.0]]), mx.zeros((1, 40))
    want = reference.rejection(tokens, p[:, :1], p, u, noise)
    assert want[0].item() == 0 and want[1].item() == mx.argmax(p[0, 0]).item()
    assert_same(accept.rejection(tokens, p[:, :1], p, u, noise), want)


def test_ids_outside_the_vocabulary_read_nothing_outside():
    p = mx.softmax(normal(1, 3, 40), axis=-1)
    u, noise = mx.array([[0.0, 0.0]]), mx.zeros((1, 40))
    for tokens in ([[40, 2]], [[-1, 2]]):
        want = reference.rejection(mx.array(tokens), None, p, u, noise)
        assert_same(accept.rejection(mx.array(tokens), None, p, u, noise), want)


def test_scores_are_read_once():
    scores = normal(2, 4, 20000).astype(mx.bfloat16)
    accept.match_best(mx.zeros((2, 3), dtype=mx.int32), scores)
    assert SIMULATOR.reports[-2].buffers["scores"].loads_bytes == scores.nbytes
