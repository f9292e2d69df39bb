"""The gated delta rule for many rows at once: blocks of rows in parallel, the state carried from block to block.

With G the cumulative log-decay inside a block, A[t, i] = beta_t (k_t . k_i) e^(G_t - G_i) for i < t, and
U = (I + A)⁻¹ beta (v - e^G S k): y = e^G S q + lower(q kᵀ e^(G_t - G_i)) U and S <- e^G_C S + Uᵀ (e^(G_C - G) k)
(the WY form of Yang et al. 2024, arXiv 2406.06484 and 2412.06464).
"""

import mlx.core as mx

from specmlx.kernels.gated_delta.reference import per_value_head

GRID = 64
_LEAF = 8


def delta_rule(
    S: mx.array,
    q: mx.array,
    k: mx.array,
    v: mx.array,
    log_g: mx.array,
    beta: mx.array,
    block: int = GRID,
) -> tuple[mx.array, mx.array]:
    """Outputs y `[B, T, Hv, Dv]` (q's dtype) and the state after T rows, in blocks from the first row on.

    Shapes: S `[B, Hv, Dv, Dk]` float32; q, k `[B, T, Hk, Dk]`; v `[B, T, Hv, Dv]`; log_g (float32), beta `[B, T, Hv]`.
    The last block is padded with neutral rows (k = v = beta = 0, g = 1): a row's bits don't depend on how many follow.
    """
    B, T, Hv, Dv = v.shape
    n = -(-T // block)

    def blocks(x: mx.array) -> mx.array:
        x = x.astype(mx.float32)
        if n * block > T:
            x = mx.pad(x, [(0, 0), (0, n * block - T)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(B, n, block, Hv, -1).transpose(1, 0, 3, 2, 4)  # [n, B, Hv, C, D]

    q_, k_ = blocks(per_value_head(q, Hv)), blocks(per_value_head(k, Hv))
    v_, beta_, log_g_ = blocks(v), blocks(beta), blocks(log_g)

    rows = mx.arange(block)
    after = rows[:, None] > rows
    # G_t - G_i summed from row i + 1 on: behind a row that forgets, the difference of two long sums has no digits left.
    between = mx.cumsum(mx.where(after, log_g_, 0), axis=-2)
    # Above the diagonal nothing is seen: mask the exponent, not the result.
    ratio = mx.exp(mx.where(after.T, -mx.inf, between))
    k_t = k_.swapaxes(-1, -2)
    inverse = unit_lower_inverse(beta_ * (k_ @ k_t) * ratio * after)
    grown = mx.exp(mx.cumsum(log_g_, axis=-2))
    U0 = inverse @ (beta_ * v_)
    W = inverse @ (beta_ * grown * k_)
    scores = (q_ @ k_t) * ratio
    q_in = grown * q_
    total = grown[..., -1:, :]
    k_out = k_ * ratio[..., -1:, :].swapaxes(-1, -2)

    ys = []
    for i in range(n):
        S_t = S.swapaxes(-1, -2)
        U = U0[i] - W[i] @ S_t
        ys.append(q_in[i] @ S_t + scores[i] @ U)
        S = total[i] * S + U.swapaxes(-1, -2) @ k_out[i]
    y = mx.stack(ys).transpose(1, 0, 3, 2, 4).reshape(B, n * block, Hv, Dv)
    return y[:, :T].astype(q.dtype), S


@mx.custom_function
def unit_lower_inverse(A: mx.array) -> mx.array:
    """(I + A)⁻¹ for strictly lower triangular A `[..., C, C]`, C a power of two of at least 8.

    Neumann doubling only inside 8 x 8 blocks, where powers of A stay small, then blocks are merged two by two:
    over 64 rows of similar keys the powers would grow like binomials and cancel.
    """
    C = A.shape[-1]
    inverse = _neumann(_diagonal(A, _LEAF, 0, 0))
    size = _LEAF
    while size < C:
        below = _diagonal(A, 2 * size, size, 0)
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -(second @ below @ first)
        top = mx.concatenate([first, mx.zeros_like(first)], axis=-1)
        inverse = mx.concatenate([top, mx.concatenate([corner, second], axis=-1)], axis=-2)
        size *= 2
    return inverse.squeeze(-3)


@unit_lower_inverse.vjp
def _unit_lower_inverse_vjp(_, cotangent, inverse):
    transposed = inverse.swapaxes(-1, -2)
    return -(transposed @ cotangent @ transposed)


def _neumann(A: mx.array) -> mx.array:
    inverse, power, size = mx.eye(A.shape[-1]) - A, A, 2
    while size < A.shape[-1]:
        power = power @ power
        inverse = inverse + inverse @ power
        size *= 2
    return inverse


def _diagonal(A: mx.array, step: int, row: int, column: int) -> mx.array:
    """Squares `[..., C / step, s, s]` along the diagonal: from `row` and `column` of every `step` x `step` block."""
    s = step - row if row else step
    squares = [A[..., i + row : i + row + s, i + column : i + column + s] for i in range(0, A.shape[-1], step)]
    return mx.stack(squares, axis=-3)
