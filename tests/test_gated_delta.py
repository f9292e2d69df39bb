"""The delta rule: blocks against a float64 loop, steps against mlx-lm, the fold against steps."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.gated_delta import gated_delta_ops

from specmlx.kernels.gated_delta import GRID, delta_rule, fold, steps
from specmlx.kernels.gated_delta.chunk import unit_lower_inverse

HK, HV, DK, DV = 2, 4, 32, 16


def inputs(T: int, seed: int = 0, B: int = 1, dtype: mx.Dtype = mx.float32, decays=(0.9, 0.99992)):
    """S, q, k, v, log_g, beta of T random rows, unit q and k, heads that forget slowly and quickly."""

    def normal(i: int, *shape: int) -> mx.array:
        return mx.random.normal(shape, key=mx.random.key(10 * seed + i))

    def unit(x: mx.array) -> mx.array:
        return x / mx.linalg.norm(x, axis=-1, keepdims=True)

    S = 0.3 * normal(0, B, HV, DV, DK)
    q, k, v = unit(normal(1, B, T, HK, DK)), unit(normal(2, B, T, HK, DK)), normal(3, B, T, HV, DV)
    log_g = mx.broadcast_to(mx.log(mx.linspace(*decays, HV)), (B, T, HV))
    beta = mx.sigmoid(normal(4, B, T, HV))
    return [S, *(x.astype(dtype) for x in (q, k, v)), log_g, beta.astype(dtype)]


def in_float64(S, q, k, v, log_g, beta):
    """The rule of arXiv 2412.06464 as it is written, in numpy's float64."""
    S, q, k, v, log_g, beta = (np.array(x.astype(mx.float32), np.float64) for x in (S, q, k, v, log_g, beta))
    q, k = (np.repeat(x, HV // HK, axis=2) for x in (q, k))
    ys = []
    for t in range(q.shape[1]):
        S = S * np.exp(log_g[:, t])[..., None, None]
        delta = beta[:, t, :, None] * (v[:, t] - np.einsum("bhvk,bhk->bhv", S, k[:, t]))
        S = S + np.einsum("bhv,bhk->bhvk", delta, k[:, t])
        ys.append(np.einsum("bhvk,bhk->bhv", S, q[:, t]))
    return np.stack(ys, axis=1), S


def stepped(S, q, k, v, log_g, beta):
    return steps(S, q, k, v, mx.exp(log_g), beta)


def part(rows, start: int, stop: int, S: mx.array | None = None):
    """Rows start..stop-1, from the state S."""
    return [rows[0] if S is None else S, *(x[:, start:stop] for x in rows[1:])]


def assert_close(got, want, atol: float = 1e-5):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), rtol=0, atol=atol)


def same(a: mx.array, b: mx.array) -> bool:
    return a.dtype == b.dtype and mx.array_equal(a, b).item()


@pytest.mark.parametrize("T", [1, 3, 63, 64, 65, 130])
def test_blocks_give_what_steps_give(T):
    rows = inputs(T, seed=T)
    want = in_float64(*rows)
    assert_close(delta_rule(*rows), want)
    assert_close(stepped(*rows)[:2], want)


@pytest.mark.parametrize("T", [64, 130])
def test_rows_that_all_write_to_one_key_do_not_blow_up(T):
    rows = inputs(T, decays=(0.9999, 0.9999))
    rows[2] = mx.broadcast_to(rows[2][:, :1], rows[2].shape)
    rows[5] = mx.ones_like(rows[5])
    assert_close(delta_rule(*rows), in_float64(*rows))


@pytest.mark.parametrize("log_decay", [-30.0, -300.0, -float("inf")])
def test_rows_behind_one_that_forgets_all_keep_their_digits(log_decay):
    rows = inputs(130)
    forgets = (mx.arange(130) % 16 == 3)[None, :, None]
    rows[4] = mx.where(forgets, log_decay, rows[4])
    assert_close(delta_rule(*rows), in_float64(*rows))


@pytest.mark.linux_bits
def test_every_split_on_the_grid_gives_the_same_bits():
    rows = inputs(3 * GRID + 8)
    y, S = delta_rule(*rows)
    for cuts in ([GRID], [2 * GRID], [GRID, 2 * GRID], [GRID, 3 * GRID]):
        ys, state = [], rows[0]
        for start, stop in zip([0, *cuts], [*cuts, y.shape[1]], strict=True):
            piece, state = delta_rule(*part(rows, start, stop, state))
            ys.append(piece)
        assert same(mx.concatenate(ys, axis=1), y), cuts
        assert same(state, S), cuts
    # Off the grid the bits do differ, so that the comparison above can see a difference.
    first, state = delta_rule(*part(rows, 0, 40))
    assert not same(delta_rule(*part(rows, 40, y.shape[1], state))[0], y[:, 40:])


@pytest.mark.linux_bits
def test_a_rows_bits_do_not_depend_on_how_many_rows_follow_it():
    rows = inputs(2 * GRID)
    y, _ = delta_rule(*rows)
    for n in range(1, GRID + 1):
        assert same(delta_rule(*part(rows, 0, n))[0], y[:, :n]), n
        assert same(delta_rule(*part(rows, 0, GRID + n))[0], y[:, : GRID + n]), n


@pytest.mark.linux_bits
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_steps_have_the_bits_of_mlx_lm_in_one_pass_and_in_many(dtype):
    rows = inputs(9, dtype=dtype)
    S, q, k, v, log_g, beta = rows
    want_y, want_S = gated_delta_ops(q, k, v, mx.exp(log_g), beta, S)
    y, after, tape = stepped(*rows)
    assert same(y, want_y) and same(after, want_S)
    assert tape.delta.dtype == tape.g.dtype == after.dtype == mx.float32 and tape.k.dtype == dtype
    ys, state = [], S
    for t in range(9):
        piece, state, _ = stepped(*part(rows, t, t + 1, state))
        ys.append(piece)
    assert same(mx.concatenate(ys, axis=1), y) and same(state, after)


@pytest.mark.linux_bits
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_the_fold_of_any_number_of_rows_has_the_bits_of_stepping_them(dtype):
    B, T = 2, 7
    rows = inputs(T, B=B, dtype=dtype)
    _, _, tape = stepped(*rows)
    after = [rows[0]]
    for t in range(T):
        after.append(stepped(*part(rows, t, t + 1, after[-1]))[1])

    def poisoned(n: int):
        beyond = (mx.arange(T) >= n)[None, :, None]
        return tape._replace(
            k=mx.where(beyond[..., None], mx.nan, tape.k).astype(dtype),
            delta=mx.where(beyond[..., None], mx.nan, tape.delta),
            g=mx.where(beyond, mx.nan, tape.g),
        )

    for n in range(T + 1):
        assert same(fold(rows[0], poisoned(n), n), after[n]), n
        assert same(fold(rows[0], poisoned(n), mx.array([n, n])), after[n]), n
        m = (3 * n + 1) % (T + 1)
        folded = fold(rows[0], poisoned(max(n, m)), mx.array([n, m]))
        assert same(folded[0], after[n][0]) and same(folded[1], after[m][1]), (n, m)


def test_the_inverse_and_its_gradient_are_those_of_finite_differences():
    C = 16
    lower = np.tril(np.random.default_rng(0).normal(size=(C, C)), -1)
    weight = np.random.default_rng(1).normal(size=(C, C))

    def loss(A: np.ndarray) -> float:
        return float((weight * np.linalg.inv(np.eye(C) + A)).sum())

    A = mx.array(lower[None, None], dtype=mx.float32)
    np.testing.assert_allclose(
        np.array(unit_lower_inverse(A)[0, 0]) @ (np.eye(C) + lower), np.eye(C), rtol=0, atol=1e-4
    )
    gradient = np.array(mx.grad(lambda A: (mx.array(weight, dtype=mx.float32) * unit_lower_inverse(A)).sum())(A)[0, 0])
    scale = np.abs(gradient).max()
    for i, j in zip(*np.tril_indices(C, -1), strict=True):
        step = np.zeros((C, C))
        step[i, j] = 1e-6
        slope = (loss(lower + step) - loss(lower - step)) / 2e-6
        assert abs(gradient[i, j] - slope) < 1e-4 * scale, (i, j)


def test_gradients_of_blocks_are_those_of_steps():
    rows = inputs(GRID + 6)
    probe_y = mx.random.normal((1, GRID + 6, HV, DV), key=mx.random.key(7))
    probe_S = mx.random.normal(rows[0].shape, key=mx.random.key(8))

    def loss(rule):
        def of(*rows):
            y, S = rule(*rows)[:2]
            return (y * probe_y).sum() + (S * probe_S).sum()

        return mx.grad(of, argnums=tuple(range(6)))

    names, blocks = "S q k v log_g beta".split(), loss(delta_rule)(*rows)
    for name, got, want in zip(names, blocks, loss(stepped)(*rows), strict=True):
        scale = mx.abs(want).max().item()
        assert mx.abs(got - want).max().item() < 1e-4 * scale, name
