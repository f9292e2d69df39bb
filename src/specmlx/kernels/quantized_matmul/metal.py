"""Launches of the quantized_matmul kernels; the factory is an argument, so a simulator can run the same launches."""

from collections.abc import Callable
from functools import lru_cache
from math import ceil

import mlx.core as mx
from mlx_lm.models.activations import swiglu

from specmlx.kernels.quantized_matmul.reference import Matrix
from specmlx.kernels.source import Source
from specmlx.kernels.tuning import tuning

MODES = {"affine": 0, "nvfp4": 1, "mxfp4": 2, "mxfp8": 3, "fp8": 4}
# (group size, bits) of each mode; fp8 has no groups, only a scale of the whole tensor.
FORMATS = {
    "affine": {(group, bits) for group in (32, 64, 128) for bits in (2, 3, 4, 5, 6, 8)},
    "nvfp4": {(16, 4)},
    "mxfp4": {(32, 4)},
    "mxfp8": {(32, 8)},
    "fp8": {(None, 8)},
}


def supported(x: mx.array, matrix: Matrix, variant: str = "A") -> bool:
    """Whether x `[..., K]` times the matrix (or experts') has a kernel of this form.

    x is bfloat16 or float16 and affine scales have its dtype; any N; any K of whole groups (fp8: a multiple of 16).
    Form "B" takes affine weights of 4 or 8 bits in groups of 64 or 128.
    """
    w, scales, _, group_size, bits, mode, _ = matrix
    scales_dtype = None if scales is None else scales.dtype
    return _supported(x.dtype, x.shape[-1], w.dtype, w.shape[-2:], scales_dtype, group_size, bits, mode, variant)


# What follows from shapes and dtypes is kept: a round of decoding makes hundreds of these calls.
@lru_cache(maxsize=1024)
def _supported(dtype, K, w_dtype, w_shape, scales_dtype, group_size, bits, mode, variant) -> bool:
    return (
        variant in ("A", "AX", "B", "V")
        and (variant != "B" or scales_outside(mode, bits, group_size))
        and dtype in (mx.bfloat16, mx.float16)
        and (group_size, bits) in FORMATS.get(mode, ())
        and (mode != "affine" or scales_dtype == dtype)
        and K % (group_size or 16) == 0
        and w_dtype == mx.uint32
        and w_shape[1] * 32 == K * bits
        and w_shape[0] * w_shape[1] < 2**30  # offsets within a matrix are 32 bits of bytes
    )


def scales_outside(mode: str, bits: int, group_size: int | None) -> bool:
    """Whether form B takes the format, which applies scales outside the matrix operations."""
    return mode == "affine" and bits in (4, 8) and group_size in (64, 128)


def block(bits: int) -> int:
    """Weights of a row in one block of K: 8 slots of 16 bytes where whole weights fill them, else of 32 weights."""
    return 8 * (128 // bits if bits in (4, 8) else 32)


def split(K: int, bits: int) -> int:
    """Simdgroups of a threadgroup, which share K: from K and the format alone, as it decides the order of the sums.

    The largest power of two up to the table's number whose fullest simdgroup has few more blocks than the mean.
    """
    blocks, most, uneven = K // block(bits), tuning().simdgroups, tuning().uneven
    return next((s for s in (8, 4, 2) if s <= min(blocks, most) and ceil(blocks / s) * s <= uneven * blocks), 1)


def shared_words(K: int, group_size: int | None, bits: int, mode: str) -> int:
    """Words of threadgroup memory of form A: the scales of 32 rows of w (24 KiB at a time), later 1 KiB a simdgroup.

    One of four sizes, so that few kernels are compiled.
    """
    groups = 0 if mode == "fp8" else K // group_size
    words = max(256 * split(K, bits), groups * (32 if mode == "affine" else 8))
    return next((size for size in (2048, 3072, 4096) if words <= size), 6144)


_HEADER = "quantized_matmul/decode quantized_matmul/staging quantized_matmul/matrix"


def _form(form: str, inputs: str, body: str, header: str = "") -> Source:
    """inputs: behind those of the weights; header: files before the body, behind those of every form."""
    inputs = f"w scales biases tensor_scale {inputs}"
    header = f"{_HEADER} quantized_matmul/{header}" if header else _HEADER
    return Source(f"quantized_matmul_{form}", inputs, "out", f"quantized_matmul/{body}", header)


_FORMS = {
    "A": _form("A", "x ordered_x residual", "matrix_rows"),
    "paired A": _form("paired", "up_w up_scales up_biases up_tensor_scale x ordered_x", "paired_rows"),
    "B": _form("B", "x ordered_x x_sums", "grouped_rows", "grouped"),
    "V": _form("V", "x", "vector_rows", "vector"),
    "gather": _form("gather", "rows experts x", "gather", "experts"),
}
_FORMS |= {"AX": _FORMS["A"], "paired AX": _FORMS["paired A"]}
_ORDER = Source("order_out", "x", "out", "quantized_matmul/order")
_ORDER_SUMS = Source("order_x_sums", "x", "out x_sums", "quantized_matmul/order_sums")
# Copies of one x, by form and the number of weights that a lane loads together.
Copies = dict[tuple[str, int], list[mx.array]]


def quantized_matmul(
    x: mx.array,
    matrix: Matrix,
    variant: str = "A",
    *,
    copies: Copies | None = None,
    residual: mx.array | None = None,
    factory: Callable,
) -> mx.array:
    """x `[..., K]` times the transposed weights `[N, K]`: `[..., N]` in x's dtype, sums in float32.

    Forms: "A" reads every packed word once for up to 16 rows; "AX" is A on a copy of x in the order in which lanes load
    it, with the bits of A; "B" applies affine scales outside the matrix operations, on a copy in an order of its own;
    "V" reads once for up to 5 rows. `copies` keeps these for other products of the same x. `residual` `[..., N]`, in
    x's dtype, is added to the rounded product (in "A" and "AX" by the kernel). A row's bits depend on the form, but
    neither on the other rows nor on how many there are.
    Raises ValueError for what `supported` refuses.
    """
    copies = {} if copies is None else copies
    if residual is None or variant in ("A", "AX"):
        return _product(variant, x, [matrix], copies, residual, factory)
    return _product(variant, x, [matrix], copies, None, factory) + residual


def gated_quantized_matmul(x: mx.array, gate: Matrix, up: Matrix, variant: str = "A", *, factory: Callable) -> mx.array:
    """silu(x gateᵀ) * (x upᵀ) `[..., N]`, each product and operation rounded to x's dtype.

    gate and up are of one shape and format. Forms "A" and "AX" are one pass, the others two products.
    Raises ValueError for what `supported` refuses.
    """
    copies: Copies = {}
    if variant in ("A", "AX"):
        return _product(f"paired {variant}", x, [gate, up], copies, None, factory)
    return swiglu(*(_product(variant, x, [matrix], copies, None, factory) for matrix in (gate, up)))


def gather_quantized_matmul(
    x: mx.array, matrix: Matrix, rows: mx.array, experts: mx.array, *, factory: Callable
) -> mx.array:
    """Row `rows[p]` of x `[M, K]` times expert `experts[p]` of the matrix for every pair p: `[P, N]`, by form A.

    `experts` (int32 or uint32, `[P]`) is sorted: an expert that is in use is read once for every 16 of its pairs, or 8
    where there are at most 8 pairs in all.
    Raises ValueError for what `supported` refuses.
    """
    return _launched("gather", x, [matrix], experts.size, [rows, experts, x], factory)


def gather_by_expert(
    x: mx.array, matrix: Matrix, indices: mx.array, *, sorted_indices: bool = False, factory: Callable
) -> mx.array:
    """As `mx.gather_qmm` of the matrix with rhs_indices=indices, transposed: `[*indices.shape, 1, N]`.

    x has a row `[..., 1, K]` for each of `indices` `[..., k]`, or one for every k of them, in any order.
    """
    pairs, x_rows = indices.reshape(-1), x.reshape(-1, x.shape[-1])
    shared = pairs.size // len(x_rows)
    order = mx.arange(pairs.size, dtype=mx.uint32) if sorted_indices else mx.argsort(pairs)
    experts = pairs if sorted_indices else pairs[order]
    y = gather_quantized_matmul(x_rows, matrix, order // shared, experts, factory=factory)
    return (y if sorted_indices else y[mx.argsort(order)]).reshape(*indices.shape, 1, -1)


def _product(
    form: str, x: mx.array, matrices: list[Matrix], copies: Copies, residual: mx.array | None, factory: Callable
) -> mx.array:
    """Rows `[..., K]` times one matrix, or two of a pair, with the inputs that the form reads beside the weights."""
    rows, variant = x.reshape(-1, x.shape[-1]), form.split()[-1]
    inputs = [rows]
    if variant in ("AX", "B"):
        order = variant, block(matrices[0].bits) // 8 if variant == "AX" else 0
        if order not in copies:
            copies[order] = _copy(rows, *order, factory)
        inputs += copies[order]
    elif variant == "A":
        inputs.append(rows)
    if form in ("A", "AX"):
        inputs.append(rows if residual is None else residual)
    y = _launched(form, rows, matrices, len(rows), inputs, factory, added=residual is not None)
    return y.reshape(*x.shape[:-1], -1)


def _copy(x: mx.array, form: str, slot: int, factory: Callable) -> list[mx.array]:
    """x `[M, K]` in the order in which a form's lanes load it, M padded to a multiple of 8.

    "AX": K padded to a multiple of 64; a lane loads `slot` of the weights together. "B": and x's sums over 64 columns,
    in float32.
    """
    M, K = x.shape
    tiles = ceil(M / 8)
    if form == "B":
        outputs = [((8 * tiles, K), x.dtype), ((tiles, K // 64, 8), mx.float32)]
        return _ORDER_SUMS(factory, [x], outputs, (K // 8, tiles, 1), (64, 1, 1), T=x.dtype)
    columns = ceil(K / 64) * 64
    outputs = [((8 * tiles, columns), x.dtype)]
    return _ORDER(factory, [x], outputs, (tiles * columns, 1, 1), (256, 1, 1), T=x.dtype, SLOT=slot)


def _launched(
    form: str, x: mx.array, matrices: list[Matrix], M: int, inputs: list, factory: Callable, added: bool = False
) -> mx.array:
    """What the kernel makes of M rows or pairs, `[M, N]`. Raises ValueError where there is none for x `[..., K]`."""
    variant = "A" if form == "gather" else form.split()[-1]
    for matrix in matrices:
        if not supported(x, matrix, variant):
            raise ValueError(
                f"no kernel of form {variant} for x {x.dtype} {x.shape} and {matrix.mode} weights {matrix.w.shape}, "
                f"group {matrix.group_size}, {matrix.bits} bits: use mx.quantized_matmul"
            )
    weights = [part for matrix in matrices for part in _weights(matrix)]
    shape = matrices[0].shape[-2:]
    grid, template = _launch(form, x.dtype, M, *shape, *matrices[0][3:6], added)
    return _FORMS[form](factory, weights + inputs, [((M, shape[0]), x.dtype)], grid, **template)[0]


@lru_cache(maxsize=1024)
def _launch(form: str, dtype, M, N, K, group_size, bits, mode, added) -> tuple[tuple[int, int, int], dict]:
    """Grid and template of a launch of M rows (or pairs)."""
    template = {
        "T": dtype,
        "MODE": MODES[mode],
        "BITS": bits,
        "GROUP": group_size or 16,
        "WHOLE": bits in (4, 8) and K * bits % 128 == 0,
    }
    columns = {"V": 16, "paired A": 16, "paired AX": 16}.get(form, 32)
    if form == "V":
        template["ROWS"] = tile = ceil(M / ceil(M / tuning().vectors))
    else:
        template["TILES"] = 1 if M <= 8 else tuning().tiles
        template["SHARED"] = shared_words(K, group_size, bits, mode)
        # The gathered form finds its tiles itself, from the experts of the pairs.
        tile = 1 if form == "gather" else 8 * template["TILES"]
    if form[-1] in "AX":
        template["ORDERED"] = form.endswith("AX")
    if form in ("A", "AX"):
        template["ADDED"] = added
    return (32 * split(K, bits), ceil(M / tile), ceil(N / columns)), template


def _weights(matrix: Matrix) -> list[mx.array]:
    """The four weight inputs; what a format lacks is bound to something that its kernel never reads."""
    scales = matrix.w if matrix.scales is None else matrix.scales
    factor = _one() if matrix.tensor_scale is None else mx.array(matrix.tensor_scale, mx.float32).reshape(-1)
    return [matrix.w, scales, scales if matrix.biases is None else matrix.biases, factor]


@lru_cache(maxsize=1)
def _one() -> mx.array:
    return mx.array([1.0])
