"""Launches of the quantized_matmul kernels; the factory is an argument, so a simulator can run the same launches."""

from collections.abc import Callable
from functools import lru_cache
from math import ceil

import mlx.core as mx
from mlx_lm.models.activations import swiglu

from specmlx.kernels.source import Source, made
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


def supported(
    x: mx.array,
    w: mx.array,
    scales: mx.array | None,
    *,
    group_size: int | None,
    bits: int,
    mode: str,
    variant: str = "A",
) -> bool:
    """Whether x `[..., K]` times w `[N, K * bits / 32]` (or experts `[E, N, ...]`) has a kernel of this form.

    x is bfloat16 or float16 and affine scales have its dtype; any N; any K of whole groups (fp8: a multiple of 16).
    Form "B" takes affine weights of 4 or 8 bits in groups of 64 or 128.
    """
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
    "paired": _form("paired", "up_w up_scales up_biases up_tensor_scale x ordered_x", "paired_rows"),
    "B": _form("B", "x ordered_x x_sums", "grouped_rows", "grouped"),
    "V": _form("V", "x", "vector_rows", "vector"),
    "gather": _form("gather", "rows experts x", "gather", "experts"),
}
_ORDER = Source("order_out", "x", "out", "quantized_matmul/order")
_ORDER_SUMS = Source("order_x_sums", "x", "out x_sums", "quantized_matmul/order_sums")


def order_rows(x: mx.array, *, bits: int, kernel=mx.fast.metal_kernel) -> mx.array:
    """x `[M, K]` in the order in which form A's lanes load it, M padded to a multiple of 8 and K to one of 64.

    `bits` are those of the weights. One array serves every product of x: see `Ordered`.
    """
    M, K = x.shape
    shape = (ceil(M / 8) * 8, ceil(K / 64) * 64)
    grid, outputs = (shape[0] * shape[1] // 8, 1, 1), [(shape, x.dtype)]
    return _ORDER(kernel, [x], outputs, grid, (256, 1, 1), T=x.dtype, SLOT=block(bits) // 8)[0]


def order_and_sum_rows(x: mx.array, *, kernel=mx.fast.metal_kernel) -> tuple[mx.array, mx.array]:
    """x `[M, K]` in the order of form B, M padded to a multiple of 8, and its sums over 64 columns in float32."""
    M, K = x.shape
    tiles = ceil(M / 8)
    outputs = [((8 * tiles, K), x.dtype), ((tiles, K // 64, 8), mx.float32)]
    return tuple(_ORDER_SUMS(kernel, [x], outputs, (K // 8, tiles, 1), (64, 1, 1), T=x.dtype))


class Ordered:
    """Copies of one x `[..., K]` in the orders in which the forms load it, each made when it is first asked for.

    Handed to several products of that x, they share the copies.
    """

    def __init__(self):
        self._copies: dict[tuple, mx.array | tuple[mx.array, mx.array]] = {}

    def rows(self, x: mx.array, bits: int, kernel: Callable) -> mx.array:
        """As `order_rows`, for rows `[M, K]`."""
        return self._copy(("AX", block(bits)), lambda: order_rows(x, bits=bits, kernel=kernel))

    def rows_and_sums(self, x: mx.array, kernel: Callable) -> tuple[mx.array, mx.array]:
        """As `order_and_sum_rows`."""
        return self._copy(("B",), lambda: order_and_sum_rows(x, kernel=kernel))

    def _copy(self, order: tuple, make: Callable):
        if order not in self._copies:
            self._copies[order] = make()
        return self._copies[order]


def quantized_matmul(
    x: mx.array,
    w: mx.array,
    scales: mx.array | None,
    biases: mx.array | None = None,
    *,
    group_size: int | None = 64,
    bits: int = 4,
    mode: str = "affine",
    tensor_scale: mx.array | float | None = None,
    kernel=mx.fast.metal_kernel,
    variant: str = "A",
    ordered: Ordered | None = None,
    residual: mx.array | None = None,
) -> mx.array:
    """x `[..., K]` times the transposed weights `[N, K]`: `[..., N]` in x's dtype, sums in float32.

    Arguments as `mx.quantized_matmul`, and mode "fp8" (E4M3 bytes viewed as uint32, no scales, group_size None);
    `tensor_scale`, one number or float32 `[N]`, multiplies the result (nvfp4, fp8). Forms: "A" reads every packed word
    once for up to 16 rows; "AX" is A on x in the order of `order_rows`, with the bits of A; "B" applies affine scales
    outside the matrix operations, on x in the order of `order_and_sum_rows`; "V" reads once for up to 5 rows. `ordered`
    keeps x in these orders for other products of the same x. `residual` `[..., N]`, in x's dtype, is added to the
    rounded product (in "A" and "AX" by the kernel). A row's bits depend on the form, but neither on the other rows nor
    on how many there are.
    Raises ValueError for what `supported` refuses.
    """
    _check(x, w, scales, variant, group_size, bits, mode)
    rows = x.reshape(-1, x.shape[-1])
    (M, K), N = rows.shape, w.shape[0]
    ordered = ordered or Ordered()
    if variant == "V":
        inputs = [rows]
    elif variant == "B":
        inputs = [rows, *ordered.rows_and_sums(rows, kernel)]
    else:
        inputs = [*_ordered(rows, variant, bits, ordered, kernel), rows if residual is None else residual]
    launch = _launch(variant, x.dtype, M, N, K, group_size, bits, mode, residual is not None)
    [out] = made(_FORMS[variant[0]], kernel)(inputs=[*_weights(w, scales, biases, tensor_scale), *inputs], **launch)
    out = out.reshape(*x.shape[:-1], N)
    return out if residual is None or variant in ("A", "AX") else out + residual


def gated_quantized_matmul(
    x: mx.array,
    gate: tuple,
    up: tuple,
    *,
    group_size: int | None = 64,
    bits: int = 4,
    mode: str = "affine",
    kernel=mx.fast.metal_kernel,
    variant: str = "A",
    ordered: Ordered | None = None,
) -> mx.array:
    """silu(x gateᵀ) * (x upᵀ) `[..., N]`, each product and operation rounded to x's dtype.

    gate and up are `(w, scales, biases, tensor_scale)` of one format, trailing Nones left out. Forms "A" and "AX" are
    one pass, the others two products. Raises ValueError for what `supported` refuses.
    """
    gate, up = ((*matrix, *[None] * (4 - len(matrix))) for matrix in (gate, up))
    if variant not in ("A", "AX"):
        options = {"group_size": group_size, "bits": bits, "mode": mode, "kernel": kernel, "variant": variant}
        options["ordered"] = ordered or Ordered()
        return swiglu(*(quantized_matmul(x, *matrix[:3], tensor_scale=matrix[3], **options) for matrix in (gate, up)))
    for w, scales, *_ in (gate, up):
        _check(x, w, scales, variant, group_size, bits, mode)
    rows = x.reshape(-1, x.shape[-1])
    (M, K), N = rows.shape, gate[0].shape[0]
    [out] = made(_FORMS["paired"], kernel)(
        inputs=[*_weights(*gate), *_weights(*up), *_ordered(rows, variant, bits, ordered or Ordered(), kernel)],
        **_launch(f"paired {variant}", x.dtype, M, N, K, group_size, bits, mode),
    )
    return out.reshape(*x.shape[:-1], N)


def gather_quantized_matmul(
    x: mx.array,
    w: mx.array,
    scales: mx.array | None,
    biases: mx.array | None,
    rows: mx.array,
    experts: mx.array,
    *,
    group_size: int | None = 64,
    bits: int = 4,
    mode: str = "affine",
    tensor_scale: mx.array | float | None = None,
    kernel=mx.fast.metal_kernel,
) -> mx.array:
    """Row `rows[p]` of x `[M, K]` times expert `experts[p]` of w `[E, N, ...]` for every pair p: `[P, N]`, by form A.

    `experts` (int32 or uint32, `[P]`) is sorted: an expert that is in use is read once for every 16 of its pairs, or 8
    where there are at most 8 pairs in all. `tensor_scale`: one number, or float32 `[E, N]`.
    Raises ValueError for what `supported` refuses.
    """
    _check(x, w, scales, "A", group_size, bits, mode)
    P, K, N = experts.size, x.shape[-1], w.shape[1]
    [out] = made(_FORMS["gather"], kernel)(
        inputs=[*_weights(w, scales, biases, tensor_scale), rows, experts, x],
        **_launch("gather", x.dtype, P, N, K, group_size, bits, mode),
    )
    return out


def gather_by_expert(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    indices: mx.array,
    *,
    sorted_indices: bool = False,
    **options,
) -> mx.array:
    """As `mx.gather_qmm(x, w, scales, biases, rhs_indices=indices, transpose=True)`: `[*indices.shape, 1, N]`.

    x has a row `[..., 1, K]` for each of `indices` `[..., k]`, or one for every k of them, in any order. options: as of
    `gather_quantized_matmul`.
    """
    pairs, x_rows = indices.reshape(-1), x.reshape(-1, x.shape[-1])
    shared = pairs.size // len(x_rows)
    order = mx.arange(pairs.size, dtype=mx.uint32) if sorted_indices else mx.argsort(pairs)
    experts = pairs if sorted_indices else pairs[order]
    y = gather_quantized_matmul(x_rows, w, scales, biases, order // shared, experts, **options)
    return (y if sorted_indices else y[mx.argsort(order)]).reshape(*indices.shape, 1, -1)


@lru_cache(maxsize=1024)
def _launch(form: str, dtype, M, N, K, group_size, bits, mode, added: bool = False) -> dict:
    """Template, grid and output of a launch of M rows (or pairs)."""
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
    simdgroups = split(K, bits)
    return {
        "template": list(template.items()),
        "grid": (32 * simdgroups, ceil(M / tile), ceil(N / columns)),
        "threadgroup": (32 * simdgroups, 1, 1),
        "output_shapes": [(M, N)],
        "output_dtypes": [dtype],
    }


def _ordered(rows, variant, bits, ordered, kernel) -> list[mx.array]:
    """The inputs x and ordered_x of form A or AX."""
    return [rows, ordered.rows(rows, bits, kernel) if variant == "AX" else rows]


def _weights(w, scales, biases, tensor_scale) -> list[mx.array]:
    """The four weight inputs; what a format lacks is bound to something that its kernel never reads."""
    scales = w if scales is None else scales
    factor = _one() if tensor_scale is None else mx.array(tensor_scale, mx.float32).reshape(-1)
    return [w, scales, scales if biases is None else biases, factor]


@lru_cache(maxsize=1)
def _one() -> mx.array:
    return mx.array([1.0])


def _check(x, w, scales, variant, group_size, bits, mode):
    if not supported(x, w, scales, group_size=group_size, bits=bits, mode=mode, variant=variant):
        raise ValueError(
            f"no kernel of form {variant} for x {x.dtype} {x.shape} and {mode} weights {w.shape}, group {group_size}, "
            f"{bits} bits: use mx.quantized_matmul"
        )
