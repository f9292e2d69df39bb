"""x wᵀ with every weight written out in float32: what the kernels are held against."""

import mlx.core as mx


def dense(
    w: mx.array,
    scales: mx.array | None,
    biases: mx.array | None = None,
    *,
    group_size: int = 64,
    bits: int = 4,
    mode: str = "affine",
    tensor_scale: mx.array | float | None = None,
) -> mx.array:
    """The weights `[..., N, K]` of packed words `[..., N, K * bits / 32]`, in float32.

    `mode` is one of mlx's, or "fp8": E4M3 bytes with no scale but `tensor_scale`, one number or `[..., N]`.
    """
    if mode == "fp8":
        weights = mx.from_fp8(w.view(mx.uint8), dtype=mx.float32)
    elif mode == "affine":
        weights = mx.dequantize(
            w, scales.astype(mx.float32), biases.astype(mx.float32), group_size=group_size, bits=bits, mode=mode
        )
    else:
        weights = mx.dequantize(w, scales, group_size=group_size, bits=bits, mode=mode, dtype=mx.float32)
    if tensor_scale is None:
        return weights
    # One number, or one for each row.
    return weights * mx.array(tensor_scale)[..., None]


def quantized_matmul(x: mx.array, w: mx.array, scales: mx.array | None, biases: mx.array | None = None, **format):
    """x `[..., K]` times the transposed weights, `[..., N]` in x's dtype; products and sums in float32."""
    return (x.astype(mx.float32) @ dense(w, scales, biases, **format).T).astype(x.dtype)


def gather_quantized_matmul(
    x: mx.array,
    w: mx.array,
    scales: mx.array | None,
    biases: mx.array | None,
    rows: mx.array,
    experts: mx.array,
    **format,
) -> mx.array:
    """Row `rows[p]` of x `[M, K]` times expert `experts[p]` of w `[E, N, ...]`, for every p: `[P, N]`."""
    weights = dense(w, scales, biases, **format)[experts]
    return (weights @ x.astype(mx.float32)[rows][..., None])[..., 0].astype(x.dtype)
