"""The gated delta rule row by row, and the fold of rows that were accepted later.

S <- g S, delta = (v - S k) beta, S <- S + delta kᵀ, y = S q (Yang et al. 2024, arXiv 2412.06464),
with mlx-lm's order of operations, so that the bits are those of its `gated_delta_ops`.
"""

from typing import NamedTuple

import mlx.core as mx


class Tape(NamedTuple):
    """What a verify pass leaves behind so that any number of its rows can enter S later.

    k `[B, T, Hk, Dk]` in the model's dtype, delta `[B, T, Hv, Dv]` and g `[B, T, Hv]` in float32.
    """

    k: mx.array
    delta: mx.array
    g: mx.array


def per_value_head(x: mx.array, Hv: int) -> mx.array:
    """Key-head rows `[B, ..., Hk, D]` repeated so that consecutive value heads share a key head: `[B, ..., Hv, D]`."""
    repeats = Hv // x.shape[-2]
    return x if repeats == 1 else mx.repeat(x, repeats, axis=-2)


def write(S: mx.array, k: mx.array, delta: mx.array) -> mx.array:
    """S + delta kᵀ for k `[B, Hv, Dk]` and delta `[B, Hv, Dv]`."""
    return S + k[..., None, :] * delta[..., None]


@mx.compile
def _step(S, q, k, v, g, beta):
    S = S * g[..., None, None]
    delta = (v - (S * k[..., None, :]).sum(axis=-1)) * beta[..., None]
    S = write(S, k, delta)
    return (S * q[..., None, :]).sum(axis=-1).astype(q.dtype), S, delta


@mx.compile
def _fold_row(S, k, delta, g):
    return write(S * g[..., None, None], k, delta)


def steps(
    S: mx.array, q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array
) -> tuple[mx.array, mx.array, Tape]:
    """T rows one after the other from S: outputs y `[B, T, Hv, Dv]`, the state after them, and their tape.

    Shapes: S `[B, Hv, Dv, Dk]` float32; q, k `[B, T, Hk, Dk]`; v `[B, T, Hv, Dv]`; g (float32), beta `[B, T, Hv]`.
    """
    Hv, T = v.shape[2], v.shape[1]
    q_heads, k_heads = per_value_head(q, Hv), per_value_head(k, Hv)
    ys, deltas = [], []
    for t in range(T):
        y, S, delta = _step(S, q_heads[:, t], k_heads[:, t], v[:, t], g[:, t], beta[:, t])
        ys.append(y)
        deltas.append(delta)
    return mx.stack(ys, axis=1), S, Tape(k, mx.stack(deltas, axis=1), g)


def fold(S: mx.array, tape: Tape, count: int | mx.array) -> mx.array:
    """S after the first `count` rows of the tape: the operations of stepping, so the bits of stepping.

    `count` is an int for all lanes, or an int32 array `[B]` that the host need not have read.
    """
    T, Hv = tape.delta.shape[1:3]
    k = per_value_head(tape.k, Hv)
    for t in range(count if isinstance(count, int) else T):
        folded = _fold_row(S, k[:, t], tape.delta[:, t], tape.g[:, t])
        # `where`, never a product: rows that must not count may hold NaN.
        S = folded if isinstance(count, int) else mx.where((t < count)[:, None, None, None], folded, S)
    return S


def advance(S: mx.array, tape: Tape | None, count: int | mx.array, *rows: mx.array) -> tuple[mx.array, mx.array, Tape]:
    """S with the first `count` rows of the tape in it, the outputs `[B, T, Hv, Dv]` of T rows from there, their tape.

    rows: q, k, v, g and beta, with the shapes of `steps`; `count` as of `fold`.
    """
    S = S if tape is None else fold(S, tape, count)
    y, _, new = steps(S, *rows)
    return S, y, new
