"""x wᵀ with every weight written out in float32: what the kernels are held against."""

from typing import Any, NamedTuple

import mlx.core as mx


class Matrix(NamedTuple):
    """Packed weights `[N, K]`, or those of experts `[E, N, K]`, in one of mlx's formats or in mode "fp8".

    w: words `[..., N, K * bits / 32]` uint32. scales and biases: as of `mx.quantize`. fp8: E4M3 bytes viewed as uint32,
    scales and group_size None. tensor_scale multiplies the product (nvfp4, fp8): one number, or float32 `[..., N]`.
    """

    w: mx.array
    scales: mx.array | None
    biases: mx.array | None = None
    group_size: int | None = 64
    bits: int = 4
    mode: str = "affine"
    tensor_scale: mx.array | float | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """`[..., N, K]` of the weights."""
        return *self.w.shape[:-1], self.w.shape[-1] * 32 // self.bits

    @property
    def format(self) -> dict[str, Any]:
        """As mlx's functions name it."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}

    @property
    def nbytes(self) -> int:
        """Of the words, scales and biases."""
        return sum(x.nbytes for x in self[:3] if x is not None)


def dense(matrix: Matrix) -> mx.array:
    """The weights `[..., N, K]`, in float32."""
    w, scales, biases = matrix[:3]
    if matrix.mode == "fp8":
        weights = mx.from_fp8(w.view(mx.uint8), dtype=mx.float32)
    elif matrix.mode == "affine":
        weights = mx.dequantize(w, scales.astype(mx.float32), biases.astype(mx.float32), **matrix.format)
    else:
        weights = mx.dequantize(w, scales, dtype=mx.float32, **matrix.format)
    return weights if matrix.tensor_scale is None else weights * mx.array(matrix.tensor_scale)[..., None]


def quantized_matmul(x: mx.array, matrix: Matrix) -> mx.array:
    """x `[..., K]` times the transposed weights, `[..., N]` in x's dtype; products and sums in float32."""
    return (x.astype(mx.float32) @ dense(matrix).T).astype(x.dtype)


def gather_quantized_matmul(x: mx.array, matrix: Matrix, rows: mx.array, experts: mx.array) -> mx.array:
    """Row `rows[p]` of x `[M, K]` times expert `experts[p]` of the matrix, for every p: `[P, N]`."""
    return (dense(matrix)[experts] @ x.astype(mx.float32)[rows][..., None])[..., 0].astype(x.dtype)
