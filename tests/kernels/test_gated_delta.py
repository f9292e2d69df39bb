"""The delta rule: prefill and steps against mlx-lm and a float64 loop, the fold against steps."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.gated_delta import gated_delta_ops

from specmlx.kernels.gated_delta import fold, prefill, steps

HK, HV, DK, DV = 2, 4, 32, 16


def inputs(T: int, seed: int = 0, B: int = 1, dtype: mx.Dtype = mx.float32):
    """S, q, k, v, g, beta of T random rows, unit q and k, heads that forget slowly and quickly."""

    def normal(i: int, *shape: int) -> mx.array:
        return mx.random.normal(shape, key=mx.random.key(10 * seed + i))

    def unit(x: mx.array) -> mx.array:
        return x / mx.linalg.norm(x, axis=-1, keepdims=True)

    S = 0.3 * normal(0, B, HV, DV, DK)
    q, k, v = unit(normal(1, B, T, HK, DK)), unit(normal(2, B, T, HK, DK)), normal(3, B, T, HV, DV)
    g = mx.broadcast_to(mx.linspace(0.9, 0.99992, HV), (B, T, HV))
    beta = mx.sigmoid(normal(4, B, T, HV))
    return [S, *(x.astype(dtype) for x in (q, k, v)), g, beta.astype(dtype)]


def in_float64(S, q, k, v, g, beta):
    """The rule of arXiv 2412.06464 as it is written, in numpy's float64."""
    S, q, k, v, g, beta = (np.array(x.astype(mx.float32), np.float64) for x in (S, q, k, v, g, beta))
    q, k = (np.repeat(x, HV // HK, axis=2) for x in (q, k))
    ys = []
    for t in range(q.shape[1]):
        S = S * g[:, t, :, None, None]
        delta = beta[:, t, :, None] * (v[:, t] - np.einsum("bhvk,bhk->bhv", S, k[:, t]))
        S = S + np.einsum("bhv,bhk->bhvk", delta, k[:, t])
        ys.append(np.einsum("bhvk,bhk->bhv", S, q[:, t]))
    return np.stack(ys, axis=1), S


def part(rows, start: int, stop: int, S: mx.array | None = None):
    """Rows start..stop-1, from the state S."""
    return [rows[0] if S is None else S, *(x[:, start:stop] for x in rows[1:])]


def assert_close(got, want, atol: float = 1e-5):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), rtol=0, atol=atol)


def assert_bits(got, want):
    assert all(same(a, b) for a, b in zip(got, want, strict=True))


def same(a: mx.array, b: mx.array) -> bool:
    return a.dtype == b.dtype and mx.array_equal(a, b).item()


@pytest.mark.linux_bits
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize(("T", "B"), [(1, 2), (2, 1), (63, 1), (64, 2), (65, 3)])
def test_a_prefill_has_the_bits_of_steps_and_of_mlx_lm_at_every_split(T, B, dtype):
    rows = inputs(T, seed=T, B=B, dtype=dtype)
    y, S = prefill(*rows)
    assert y.dtype == dtype and S.dtype == mx.float32
    assert_bits((y, S), steps(*rows)[:2])
    assert_bits((y, S), gated_delta_ops(*rows[1:], rows[0]))
    cut = T // 3
    first, state = prefill(*part(rows, 0, cut + 1))
    if cut + 1 < T:
        rest, state = prefill(*part(rows, cut + 1, T, state))
        first = mx.concatenate([first, rest], axis=1)
    assert_bits((first, state), (y, S))


@pytest.mark.parametrize("T", [1, 65])
def test_steps_and_prefill_are_the_rule_in_float64(T):
    rows = inputs(T, seed=T)
    assert_close(steps(*rows)[:2], in_float64(*rows))
    assert_close(prefill(*rows), in_float64(*rows))


@pytest.mark.linux_bits
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_steps_have_the_bits_of_mlx_lm_in_one_pass_and_in_many(dtype):
    rows = inputs(9, dtype=dtype)
    S = rows[0]
    want_y, want_S = gated_delta_ops(*rows[1:], S)
    y, after, tape = steps(*rows)
    assert same(y, want_y) and same(after, want_S)
    assert tape.delta.dtype == tape.g.dtype == after.dtype == mx.float32 and tape.k.dtype == dtype
    ys, state = [], S
    for t in range(9):
        piece, state, _ = steps(*part(rows, t, t + 1, state))
        ys.append(piece)
    assert same(mx.concatenate(ys, axis=1), y) and same(state, after)


@pytest.mark.linux_bits
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_the_fold_of_any_number_of_rows_has_the_bits_of_stepping_them(dtype):
    B, T = 2, 7
    rows = inputs(T, B=B, dtype=dtype)
    _, _, tape = steps(*rows)
    after = [rows[0]]
    for t in range(T):
        after.append(steps(*part(rows, t, t + 1, after[-1]))[1])

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


def test_the_gradient_of_a_prefill_is_that_of_steps():
    rows = inputs(20)
    probe_y = mx.random.normal((1, 20, HV, DV), key=mx.random.key(7))
    probe_S = mx.random.normal(rows[0].shape, key=mx.random.key(8))

    def gradient(rule):
        def of(*rows):
            y, S = rule(*rows)[:2]
            return (y * probe_y).sum() + (S * probe_S).sum()

        return mx.grad(of, argnums=tuple(range(6)))(*rows)

    for name, got, want in zip("S q k v g beta".split(), gradient(prefill), gradient(steps), strict=True):
        assert mx.abs(got - want).max().item() < 1e-5 * mx.abs(want).max().item(), name
