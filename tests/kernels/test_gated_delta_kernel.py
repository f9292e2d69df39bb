"""The gated delta kernels, their Metal source run on the CPU: against the reference and themselves, and traffic."""

import mlx.core as mx
import numpy as np
import pytest
from msl import Simulator
from rig import in_rounds, serve, tiny, tokens

from specmlx.kernels import dispatch, gated_delta
from specmlx.kernels.gated_delta import reference
from specmlx.kernels.gated_delta.reference import Tape

SIMULATOR = Simulator()
FACTORY = SIMULATOR.metal_kernel


@pytest.fixture(autouse=True)
def served(monkeypatch):
    serve(monkeypatch, FACTORY)


# Hk, Hv, Dk, Dv: the real shape's heads, one head, sizes that are no power of two, one row a lane.
SHAPES = [(2, 6, 128, 128), (1, 1, 32, 32), (2, 4, 96, 64), (1, 2, 160, 32)]


def rows(T: int, shape=SHAPES[2], B: int = 1, dtype: mx.Dtype = mx.float32, seed: int = 0):
    """q, k, v, g, beta of T random rows with unit q and k."""
    Hk, Hv, Dk, Dv = shape

    def normal(i: int, *shape: int) -> mx.array:
        return mx.random.normal(shape, key=mx.random.key(100 * seed + i))

    q, k = (x / mx.linalg.norm(x, axis=-1, keepdims=True) for x in (normal(1, B, T, Hk, Dk), normal(2, B, T, Hk, Dk)))
    g = mx.exp(-mx.abs(normal(4, B, T, Hv)))
    beta = mx.sigmoid(normal(5, B, T, Hv))
    return [*(x.astype(dtype) for x in (q, k, normal(3, B, T, Hv, Dv))), g, beta.astype(dtype)]


def state(shape=SHAPES[2], B: int = 1) -> mx.array:
    _, Hv, Dk, Dv = shape
    return 0.3 * mx.random.normal((B, Hv, Dv, Dk), key=mx.random.key(9))


def poisoned(tape: Tape, count: mx.array) -> Tape:
    """The tape with NaN in the rows that don't count."""
    beyond = mx.arange(tape.k.shape[1]) >= count[:, None]
    return Tape(
        mx.where(beyond[..., None, None], mx.nan, tape.k).astype(tape.k.dtype),
        mx.where(beyond[..., None, None], mx.nan, tape.delta),
        mx.where(beyond[..., None], mx.nan, tape.g),
    )


def advance(S, tape, count, *rows):
    return gated_delta.advance(S, tape, count, *rows)


def fold(S, tape, count):
    return gated_delta.fold(S, tape, count)


def same(a: mx.array, b: mx.array) -> bool:
    return a.dtype == b.dtype and np.array_equal(np.array(a.view(mx.uint8)), np.array(b.view(mx.uint8)))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_folded_state_outputs_and_tape_are_the_references(shape, dtype):
    B, before, now = 3, rows(5, shape, 3, dtype, seed=1), rows(3, shape, 3, dtype, seed=2)
    S, count = state(shape, B), mx.array([0, 2, 5], dtype=mx.int32)
    tape = reference.steps(S, *before)[2]
    base, y, new = advance(S, poisoned(tape, count), count, *now)
    want_base = reference.fold(S, tape, count)
    want_y, _, want = reference.steps(want_base, *now)
    np.testing.assert_allclose(np.array(base), np.array(want_base), rtol=0, atol=1e-6)
    np.testing.assert_allclose(np.array(new.delta), np.array(want.delta), rtol=0, atol=1e-6)
    rounding = 1e-6 if dtype == mx.float32 else 2**-8
    np.testing.assert_allclose(
        np.array(y.astype(mx.float32)), np.array(want_y.astype(mx.float32)), rtol=rounding, atol=1e-6
    )
    assert y.dtype == dtype and new.delta.dtype == new.g.dtype == base.dtype == mx.float32


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[2], SHAPES[3]])
def test_a_pass_and_the_fold_of_any_of_its_rows_have_the_bits_of_single_row_passes(shape):
    T, S = 5, state(shape)
    passed = rows(T, shape, dtype=mx.bfloat16)
    base, y, tape = advance(S, None, 0, *passed)
    assert same(base, S)
    one, singles = S, []
    for t in range(T):
        row = [x[:, t : t + 1] for x in passed]
        _, y_t, tape_t = advance(one, None, 0, *row)
        assert same(y_t, y[:, t : t + 1]) and same(tape_t.delta, tape.delta[:, t : t + 1])
        one = fold(one, tape_t, 1)
        singles.append(one)
    for n in range(T + 1):
        count = mx.array([n], dtype=mx.int32)
        want = singles[n - 1] if n else S
        assert same(fold(S, poisoned(tape, count), count), want), n
        # The fold at the head of the next pass is the same one.
        row = [x[:, :1] for x in passed]
        assert same(advance(S, poisoned(tape, count), count, *row)[0], want), n


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_two_passes_of_any_length_have_the_bits_of_single_rows_whatever_was_folded(dtype):
    """Passes of T = 1 .. 17 rows, lanes that keep different numbers of them, poisoned tapes."""
    shape, B = SHAPES[1], 2
    all_rows, S = rows(34, shape, B, dtype), state(shape, B)
    one, states, ys, tape, count = S, [S], [], None, 0
    for t in range(34):
        base, y, tape = advance(one, tape, count, *(x[:, t : t + 1] for x in all_rows))
        count = mx.ones(B, dtype=mx.int32)
        one = base
        ys.append(y[:, 0])
        states.append(fold(base, tape, 1))
    for T in range(1, 18):
        _, y, tape = advance(S, None, 0, *(x[:, :T] for x in all_rows))
        assert all(same(y[:, t], ys[t]) for t in range(T)), T
        kept = [7 * T % (T + 1), T]
        count = mx.array(kept, dtype=mx.int32)
        rest = [mx.stack([x[b, n : n + T] for b, n in enumerate(kept)]) for x in all_rows]
        base, y, _ = advance(S, poisoned(tape, count), count, *rest)
        for b, n in enumerate(kept):
            assert same(base[b], states[n][b]), (T, n)
            assert all(same(y[b, t], ys[n + t][b]) for t in range(T)), (T, n)


def test_a_prefill_on_the_kernel_has_the_bits_of_its_passes_of_at_most_16_rows(monkeypatch):
    S, T = state(), 37
    passed = rows(T, dtype=mx.bfloat16)
    launches = len(SIMULATOR.reports)
    y, after = gated_delta.prefill(S, *passed)
    mx.eval(y, after)
    names = [report.name for report in SIMULATOR.reports[launches:]]
    assert names == ["specmlx_gated_delta"] * 3 + ["specmlx_gated_delta_fold"]
    one, singles = S, []
    for t in range(T):
        _, y_t, tape = advance(one, None, 0, *(x[:, t : t + 1] for x in passed))
        one = fold(one, tape, 1)
        singles.append(y_t)
    assert same(y, mx.concatenate(singles, axis=1)) and same(after, one)
    # Where mlx's operator is right it runs prompts, unless they have to be consistent with steps.
    serve(monkeypatch, FACTORY, "gated_delta")
    launches = len(SIMULATOR.reports)
    mx.eval(gated_delta.prefill(S, *passed), gated_delta.prefill(S, *passed, gradient=True, consistent=True))
    assert len(SIMULATOR.reports) == launches
    assert same(gated_delta.prefill(S, *passed, consistent=True)[0], y)


def test_a_models_rounds_on_the_kernel_give_the_logits_of_mlxs_operations(monkeypatch):
    model = tiny(num_hidden_layers=4)
    ids = tokens(3, 9)[0].tolist()
    with monkeypatch.context() as patch:
        serve(patch, None)
        want = in_rounds(model, model.new_states(), ids, seed=4, most=4)
    launches = len(SIMULATOR.reports)
    serve(monkeypatch, FACTORY, "gated_delta")
    got = in_rounds(model, model.new_states(), ids, seed=4, most=4)
    assert len(SIMULATOR.reports) - launches >= 3
    np.testing.assert_allclose(np.array(mx.stack(got)), np.array(mx.stack(want)), rtol=0, atol=1e-5)


def test_a_layer_asks_for_both_kernels_together_and_for_none_in_training(monkeypatch):
    model, asked = tiny(num_hidden_layers=4), []
    layer = model.layers[0].linear_attn
    monkeypatch.setattr(dispatch, "serves", lambda operator, key: asked.append((operator, dict(key)["dtype"])))
    assert not layer.on_kernel(mx.bfloat16)
    assert asked == [("gated_delta_prefill", mx.float32), ("gated_delta", mx.bfloat16)]
    layer.consistent = True
    assert not layer.on_kernel(mx.bfloat16)
    assert asked[2:] == [("gated_delta", mx.float32), ("gated_delta", mx.bfloat16)]
    asked.clear()
    model.train()
    model.scored(tokens(3, 9))
    assert not asked


@pytest.mark.parametrize("n", [0, 4])
def test_the_state_is_read_once_and_written_once(n):
    shape = SHAPES[0]
    now, before = rows(8, shape, dtype=mx.bfloat16), rows(4, shape, dtype=mx.bfloat16, seed=1)
    S = state(shape)
    tape = reference.steps(S, *before)[2]
    mx.eval(tape)
    advance(S, tape, mx.array([n], dtype=mx.int32), *now)
    run = SIMULATOR.last
    assert run.buffers["S"].loads_bytes == run.buffers["S_out"].stores_bytes == S.nbytes
    assert run.buffers["S"].line_use == 1 and run.barriers == 0
