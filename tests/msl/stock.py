"""mlx's own quantized kernels, from the headers that its wheel brings, launched as mlx launches them."""

import mlx.core as mx

from .report import Report
from .simulator import launch
from .source import TYPES, Source

QUANTIZED = """
#include "mlx/backend/metal/kernels/steel/gemm/gemm.h"
#include "mlx/backend/metal/kernels/quantized_utils.h"
#include "mlx/backend/metal/kernels/{header}.h"
"""


def _run(function: str, header: str, buffers: dict[str, mx.array | None], out: tuple, grid, threadgroup):
    """buffers: in the kernel's order; None where nothing is bound; "y" is the output."""
    names = tuple((n if x is not None or n == "y" else "", "") for n, x in buffers.items())
    source = Source(QUANTIZED.format(header=header), function, names)
    inputs = {n: x for n, x in buffers.items() if x is not None}
    report, (y,) = launch(function.split("<")[0], source, inputs, {"y": out}, grid, threadgroup)
    return report, y


def _int(x: int) -> mx.array:
    return mx.array(x, mx.int32)


def quantized_matmul(
    kernel: str, x: mx.array, w: mx.array, scales: mx.array, biases: mx.array | None, group_size: int, bits: int
) -> tuple[Report, mx.array]:
    """x [M, K] . w [N, K]^T by `kernel`: qmv_fast, qmv_wide or qmm_t. biases None: nvfp4, mxfp4, mxfp8."""
    (M, K), N = x.shape, w.shape[0]
    T = TYPES[x.dtype]
    affine = biases is not None
    name, header = ("affine", "quantized") if affine else ("fp", "fp_quantized")
    third = {"biases": biases} if affine else {} if kernel == "qmv_wide" else {"global_scale": None}
    buffers = {"w": w, "scales": scales} | third | {"x": x, "y": None}
    batch = [("x_batch_ndims", _int(0)), ("x_shape", mx.array([M, K], mx.int32)), ("x_strides", None)]
    batch += [("w_batch_ndims", _int(0)), ("w_shape", None), ("w_strides", None), ("s_strides", None)]
    batch += [("b_strides", None)] if affine else []
    types = f"{T}, {group_size}, {bits}"
    if kernel == "qmv_fast":
        sizes = {"K": _int(K), "N": _int(N)}
        function = f"{name}_qmv_fast<{types}, false>"
        grid, group = (M * 32, N // 8 * 2, 1), (32, 2, 1)
    elif kernel == "qmv_wide":
        sizes = {"K": _int(K), "N": _int(N), "M": _int(M)}
        tiles = -(-M // 5)
        vectors, lanes = -(-M // tiles), 8 if affine else 16
        rows = 2 * 32 // lanes
        function = f"{name}_qmv_wide<{types}, {vectors}, {lanes}, false>"
        grid, group = (tiles * 32, -(-N // rows) * 2, 1), (32, 2, 1)
    elif kernel == "qmm_t":
        sizes = {"K": _int(K), "N": _int(N), "M": _int(M)}
        function = f"{name}_qmm_t<{types}, {'true' if N % 32 == 0 else 'false'}, false>"
        grid, group = (-(-N // 32) * 32, -(-M // 32) * 2, 2), (32, 2, 2)
    else:
        raise ValueError(f"no stock kernel {kernel}")
    return _run(function, header, buffers | sizes | dict(batch), ((M, N), x.dtype), grid, group)
