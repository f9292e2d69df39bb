"""Matrices in every format of the quantized_matmul kernels, the shapes that tests take them in, and float64 bounds."""

from collections.abc import Iterator
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from specmlx.kernels.quantized_matmul import Matrix

FORMATS = {
    **{f"affine{bits}g{group}": ("affine", group, bits) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)},
    "nvfp4": ("nvfp4", 16, 4),
    "mxfp4": ("mxfp4", 32, 4),
    "mxfp8": ("mxfp8", 32, 8),
    "fp8": ("fp8", None, 8),
}
COMMON = ["affine4g64", "affine8g64", "nvfp4", "mxfp8"]
GROUPED = ["affine4g64", "affine4g128", "affine8g64", "affine8g128"]  # formats of form B
ROWS = [*range(1, 18), 24, 32]
NS = [1, 8, 13, 40, 96, 1001, 1024]
KS = [64, 128, 192, 320, 512, 2048, 5120]
DTYPES = [mx.bfloat16, mx.float16]
# Forms of a product, and what is built on form A.
FORMS = ["A", "AX", "B", "V", "residual", "gate and up", "gather"]


class Case(NamedTuple):
    format: str
    dtype: mx.Dtype
    M: int
    N: int
    K: int


def sample(form: str) -> Iterator[Case]:
    """Every pair of format and M, in form A for each dtype of x and scales; N and K go round.

    No large N with a large K, for time. N = 1 makes arrays so small that Metal gives them another address space, and so
    other kernels: for a few formats. Forms other than A have one dtype a format, bfloat16 and float16 by turns.
    """
    first = i = FORMS.index(form)
    for f, name in enumerate(GROUPED if form == "B" else FORMATS):
        group = FORMATS[name][1] or 16
        for dtype in DTYPES if form in "AB" else [DTYPES[(f + first) % 2]]:
            for M in ROWS:
                N = max(NS[i % len(NS)], 1 if f % 4 == 1 else 8)
                ks = [K for K in KS if K % group == 0 and K * N <= 1024 * (192 if form == "A" else 128)]
                yield Case(name, dtype, M, N, ks[(i // len(NS) + f) % len(ks)])
                i += 1


def weights(name: str, shape: tuple[int, ...], dtype: mx.Dtype = mx.bfloat16, seed: int = 0) -> Matrix:
    """A random matrix `[..., N, K]` in a format."""
    mode, group_size, bits = FORMATS[name]
    dense = mx.random.normal(shape, key=mx.random.key(seed))
    format = {"mode": mode, "group_size": group_size, "bits": bits}
    if mode == "fp8":
        scale = 0.37 if len(shape) == 2 else mx.random.uniform(0.3, 0.4, shape[:2], key=mx.random.key(seed + 1))
        return Matrix(mx.to_fp8(dense).view(mx.uint32), None, **format, tensor_scale=scale)
    matrix = Matrix(*mx.quantize(dense.astype(dtype), **format), **format)
    if mode == "nvfp4":
        scale = mx.random.uniform(1.5, 1.7, shape[:-1], key=mx.random.key(seed + 1))
        return matrix._replace(tensor_scale=scale)
    return matrix


def one_of(experts: Matrix, expert: int) -> Matrix:
    """An expert's matrix."""
    arrays = {name: part[expert] for name, part in experts._asdict().items() if isinstance(part, mx.array)}
    return experts._replace(**arrays)


def whole(K: int, name: str) -> int:
    """The next K that the format's groups divide."""
    group = FORMATS[name][1] or 16
    return -(-K // group) * group


def inputs(M: int, K: int, dtype: mx.Dtype = mx.bfloat16, seed: int = 1) -> mx.array:
    return mx.random.normal((M, K), key=mx.random.key(seed)).astype(dtype)


def nearly_cancelling(M: int, dense: mx.array) -> mx.array:
    """Rows `[M, K]` in float16 whose products with `dense` nearly vanish: 16 bits show what float32 sums round away."""
    dense, x = float64(dense), float64(inputs(M, dense.shape[1]))
    return mx.array(x - x @ np.linalg.pinv(dense) @ dense).astype(mx.float16)


def float64(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def bits_of(x: mx.array) -> np.ndarray:
    return np.array(x.view(mx.uint16))


def assert_same_bits(a: mx.array, b: mx.array, case: object = "") -> None:
    assert a.dtype == b.dtype and np.array_equal(bits_of(a), bits_of(b)), case


def assert_rounded(y: mx.array, x: mx.array, dense: mx.array, case: object = "") -> None:
    """y is x denseᵀ `[M, N]`, summed in float32 (relative 1e-6 of the sum of magnitudes), rounded once to y's dtype."""
    x, dense = float64(x), float64(dense)
    exact, error = x @ dense.T, 1e-6 * (np.abs(x) @ np.abs(dense).T)
    low, high = (float64(mx.array((exact + e).astype(np.float32)).astype(y.dtype)) for e in (-error, error))
    y = float64(y)
    assert np.all((low <= y) & (y <= high)), f"{np.abs(y - exact).max():.2e} off: {case}"
