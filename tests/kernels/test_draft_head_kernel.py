"""The draft head's kernels, their Metal source run on the CPU, against the formulas as they read."""

import mlx.core as mx
import numpy as np
import pytest
from msl import Simulator
from rig import serve

from specmlx.kernels import draft_head
from specmlx.kernels.draft_head import Candidates, reference

SIMULATOR = Simulator()
FACTORY = SIMULATOR.metal_kernel


@pytest.fixture(autouse=True)
def served(monkeypatch):
    serve(monkeypatch, FACTORY)


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def largest(logits: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """The k largest logits in float32, largest first, and their ids; of equal ones the smaller id comes first."""
    order = mx.argsort(-logits.astype(mx.float32), axis=-1)[..., :k].astype(mx.int32)
    return mx.take_along_axis(logits.astype(mx.float32), order, axis=-1), order


@pytest.mark.parametrize("rows, V, k, dtype", [
    ((2, 3), 20000, 16, mx.bfloat16),
    ((1,), 1001, 1, mx.float32),
    ((5,), 33, 32, mx.float16),
    ((2,), 8193, 31, mx.float32),
    ((3, 1), 1024, 2, mx.float16),
    ((1, 2), 8195, 5, mx.bfloat16),
])  # fmt: skip
def test_top_k_finds_the_largest_and_of_equal_ones_the_first(rows, V, k, dtype):
    logits = normal(*rows, V).astype(dtype)
    got = draft_head.top_k(logits, k)
    for a, b in zip(got, largest(logits, k), strict=True):
        assert mx.array_equal(a, b) and a.dtype == b.dtype


def test_top_k_is_right_for_values_that_fall_rise_and_are_all_equal():
    V = 9000
    for logits in (mx.arange(V)[None], -mx.arange(V)[None], mx.zeros((1, V)), mx.full((1, V), -mx.inf)):
        got = draft_head.top_k(logits.astype(mx.float32), 16)
        want = largest(logits.astype(mx.float32), 16)
        assert mx.array_equal(got[1], want[1])


@pytest.mark.parametrize("B, S, V, R, dtype", [
    (1, 7, 1001, 64, mx.float32),
    (3, 2, 2100, 128, mx.bfloat16),
    (2, 1, 40, 256, mx.float16),
    (4, 5, 1025, 64, mx.bfloat16),
    (1, 3, 13, 512, mx.float32),
])  # fmt: skip
@pytest.mark.parametrize("noisy", [False, True])
def test_the_chain_takes_the_formulas_tokens(B, S, V, R, dtype, noisy):
    # Logits far enough apart that a sum in another order decides nothing.
    logits, w1, w2 = 4 * normal(B, S, V), normal(V, R, seed=1), 0.3 * normal(V, R, seed=2)
    logits, w1, w2 = (x.astype(dtype) for x in (logits, w1, w2))
    noise = mx.random.gumbel((B, S, V), key=mx.random.key(3)) if noisy else None
    anchor = mx.array([5, V - 1, 0, 9][:B], dtype=mx.int32)
    want, biased = reference.chain(logits, w1, w2, anchor, noise, 0.7, keep_logits=True)
    got, kept = draft_head.chain(logits, w1, w2, anchor, noise, 0.7, keep_logits=True)
    assert got.tolist() == want.tolist()
    rounding = {mx.float32: 1e-6, mx.bfloat16: 2**-7, mx.float16: 2**-10}[dtype]
    np.testing.assert_allclose(
        np.array(kept.astype(mx.float32)), np.array(biased.astype(mx.float32)), rtol=rounding, atol=20 * rounding
    )
    # Without them the tokens are the same.
    assert draft_head.chain(logits, w1, w2, anchor, noise, 0.7)[0].tolist() == want.tolist()


def test_a_chain_over_some_of_the_targets_tokens_goes_by_their_ids():
    B, S, V, Vd, R = 2, 4, 300, 90, 64
    # Whole numbers make many of them equal; the ids are in no order.
    logits, w1, w2 = mx.floor(3 * normal(B, S, Vd)), normal(V, R, seed=1), mx.zeros((Vd, R))
    w2[::7] = 0.3 * normal(13, R, seed=2)
    ids = mx.random.permutation(V, key=mx.random.key(3))[:Vd].astype(mx.int32)
    anchor = mx.array([5, V - 1], dtype=mx.int32)
    want, _ = reference.chain(logits, w1, w2, anchor, target_ids=ids)
    assert draft_head.chain(logits, w1, w2, anchor, target_ids=ids)[0].tolist() == want.tolist()
    # As over the whole vocabulary, where the others can't be drawn.
    wide, rows = mx.full((B, S, V), -mx.inf), mx.zeros((V, R))
    wide[:, :, ids], rows[ids] = logits, w2
    assert reference.chain(wide, w1, rows, anchor)[0].tolist() == want.tolist()


@pytest.mark.parametrize("B, S, K, R, dtype", [
    (1, 7, 16, 256, mx.bfloat16),
    (3, 3, 5, 40, mx.float32),
    (1, 1, 32, 31, mx.float16),
    (2, 16, 1, 64, mx.bfloat16),
])  # fmt: skip
@pytest.mark.parametrize("markov", [False, True])
def test_the_walk_takes_the_formulas_tokens(B, S, K, R, dtype, markov):
    V = 300
    before, after = normal(V, R).astype(dtype), normal(V, R, seed=1).astype(dtype)
    unary = 2 * normal(B, S, K, seed=2)
    ids = mx.random.randint(0, V, (B, S, K), key=mx.random.key(3)).astype(mx.int32)
    z = None if markov else normal(B, S, R, seed=4).astype(dtype)
    candidates = Candidates(unary, ids, before, after, mx.array([7, 0, V - 1][:B], dtype=mx.int32), z)
    for noise in (None, mx.random.gumbel((B, S, K), key=mx.random.key(5))):
        want = reference.walk(candidates, noise, 0.5)
        got = draft_head.walk(candidates, noise, 0.5)
        assert got[0].tolist() == want[0].tolist()
        np.testing.assert_allclose(np.array(got[1]), np.array(want[1]), rtol=1e-5, atol=1e-4)


def test_logits_and_markov_rows_are_read_once():
    logits, w1, w2 = (x.astype(mx.bfloat16) for x in (normal(2, 1, 2048), normal(2048, 64), normal(2048, 64)))
    draft_head.chain(logits, w1, w2, mx.array([0, 1]))
    step = SIMULATOR.reports[-2]
    assert step.buffers["w2"].loads_bytes == w2.nbytes and step.buffers["logits"].loads_bytes == logits.nbytes
    draft_head.top_k(logits, 16)
    assert SIMULATOR.reports[-2].buffers["logits"].loads_bytes == logits.nbytes


@pytest.mark.parametrize("B, S, K, R, dtype", [
    (3, 7, 16, 64, mx.bfloat16),
    (3, 3, 5, 40, mx.float32),
    (2, 1, 4, 64, mx.float16),
])  # fmt: skip
@pytest.mark.parametrize("markov", [False, True])
def test_the_path_is_the_references(B, S, K, R, dtype, markov):
    V = 300
    before, after = normal(V, R).astype(dtype), (3 * R**-0.5 * normal(V, R, seed=1)).astype(dtype)
    unary = 0.5 * normal(B, S, K, seed=2)
    ids = mx.random.randint(0, V, (B, S, K), key=mx.random.key(3)).astype(mx.int32)
    z = None if markov else normal(B, S, R, seed=4).astype(dtype)
    candidates = Candidates(unary, ids, before, after, mx.array([7, 0, V - 1][:B], dtype=mx.int32), z)
    want = reference.path(candidates)
    # What may follow decides too: the path is not the walk.
    assert S < 7 or want.tolist() != reference.walk(candidates)[0].tolist()
    launches = len(SIMULATOR.reports)
    assert draft_head.path(candidates).tolist() == want.tolist()
    assert len(SIMULATOR.reports) == launches + 1
