"""The products, whose kernels are raced, and all operators together."""

from typing import NamedTuple

import mlx.core as mx
from mlx_lm.models.activations import swiglu

from specmlx.kernels.choice.decoding import ACCEPT, ATTENTION, DRAFT_HEAD, GATED_DELTA, GATED_DELTA_PREFILL
from specmlx.kernels.choice.operator import STOCK, TOGETHER, Key, Operator
from specmlx.kernels.quantized_matmul import gated_quantized_matmul, gather_by_expert, quantized_matmul, reference
from specmlx.kernels.quantized_matmul.metal import scales_outside
from specmlx.kernels.tuning import tuning


class Packed(NamedTuple):
    """x `[M, K]` and a packed matrix `[N, K]` with its format.

    With `residual` `[M, N]` run and reference give the product and, beside it, the product plus that.
    """

    x: mx.array
    w: mx.array
    scales: mx.array
    biases: mx.array | None
    format: dict
    residual: mx.array | None = None


class QuantizedMatmul(Operator):
    """x times a packed matrix. Keys: N, K, mode, bits, group_size, dtype."""

    name = "quantized_matmul"
    raced = True

    @property
    def rows(self) -> tuple[int, ...]:
        return tuning().raced_rows

    def variants(self, key: Key) -> tuple[str, ...]:
        form_b = ("B",) if scales_outside(key["mode"], key["bits"], key["group_size"]) else ()
        return ("A", "AX", *form_b, "V")

    def small(self, key: Key) -> Key:
        # Not a multiple of any tile, so that the last rows are looked at too.
        return {**key, "N": min(key["N"], 72)}

    def nbytes(self, key: Key) -> int:
        return key["N"] * key["K"] * key["bits"] // 8

    def inputs(self, key: Key, rows: int, seed: int, exact: bool = True) -> Packed:
        dtype = getattr(mx, key["dtype"])
        N, K, mode, bits, group_size = (key[name] for name in ("N", "K", "mode", "bits", "group_size"))
        format = {"mode": mode, "bits": bits, "group_size": group_size}
        keys = mx.random.split(mx.random.key(seed), 3)
        x = mx.random.normal((rows, K), key=keys[0]).astype(dtype)
        if exact:
            packed = mx.quantize(mx.random.normal((N, K), key=keys[1]).astype(dtype), **format)
            residual = (8 * mx.random.normal((rows, N), key=keys[2])).astype(dtype)
            return Packed(x, packed[0], packed[1], packed[2] if len(packed) == 3 else None, format, residual)
        # Quantizing a large matrix takes longer than the race; for its cost any bits will do.
        w = _words(N * K * bits // 32, keys[1]).reshape(N, -1)
        scales = mx.random.normal((N, K // group_size), key=keys[2]).astype(dtype)
        if mode != "affine":
            return Packed(x, w, mx.full(scales.shape, 0x38, mx.uint8), None, format)
        return Packed(x, w, scales, -8 * scales, format)

    def run(self, variant: str, inputs: Packed) -> mx.array:
        x, w, scales, biases, format, residual = inputs

        def product(residual: mx.array | None = None) -> mx.array:
            options = dict(variant=variant, kernel=self.factory, residual=residual)
            return quantized_matmul(x, w, scales, biases, **format, **options)

        if variant == STOCK:
            y = mx.quantized_matmul(x, w, scales, biases, transpose=True, **format)
            return y if residual is None else mx.concatenate([y, y + residual], axis=-1)
        return product() if residual is None else mx.concatenate([product(), product(residual)], axis=-1)

    def reference(self, inputs: Packed) -> mx.array:
        x, w, scales, biases, format, residual = inputs
        y = reference.quantized_matmul(x.astype(mx.float32), w, scales, biases, **format)
        return y if residual is None else mx.concatenate([y, y + residual], axis=-1)


def _words(n: int, key: mx.array) -> mx.array:
    """So many random words, a piece of them over and over: to draw a head's takes several times its memory."""
    piece = mx.random.randint(0, 2**32 - 1, (min(n, 2**20),), dtype=mx.uint32, key=key)
    times = -(-n // piece.size)
    return mx.broadcast_to(piece, (times, piece.size)).reshape(-1)[:n]


class Mixed(NamedTuple):
    """A row of x `[P, 1, K]` for each pair, its expert, and the experts' packed matrices `[E, N, K]`."""

    x: mx.array
    experts: mx.array
    w: mx.array
    scales: mx.array
    biases: mx.array | None
    format: dict


class Experts(QuantizedMatmul):
    """Rows times the packed matrices of their experts. One key more, E; rows are pairs."""

    name = "experts"
    rows = (1, 8, 16, 32, 64, 128)
    # Ten experts a row.
    together = 10 * TOGETHER

    def variants(self, key: Key) -> tuple[str, ...]:
        return ("A",)

    def small(self, key: Key) -> Key:
        return {**key, "E": min(key["E"], 5), "N": min(key["N"], 40)}

    def nbytes(self, key: Key) -> int:
        return key["E"] * super().nbytes(key)

    def inputs(self, key: Key, rows: int, seed: int, exact: bool = True) -> Mixed:
        E, N = key["E"], key["N"]
        one = super().inputs({**key, "N": E * N}, rows, seed, exact)
        w, scales, biases = (None if a is None else a.reshape(E, N, -1) for a in one[1:4])
        experts = mx.random.randint(0, E, (rows,), key=mx.random.key(seed + 1))
        return Mixed(one.x[:, None], experts, w, scales, biases, one.format)

    def run(self, variant: str, inputs: Mixed) -> mx.array:
        x, experts, w, scales, biases, format = inputs
        if variant == STOCK:
            return mx.gather_qmm(x, w, scales, biases, rhs_indices=experts, transpose=True, **format)
        return gather_by_expert(x, w, scales, biases, experts, kernel=self.factory, **format)

    def reference(self, inputs: Mixed) -> mx.array:
        x, experts, w, scales, biases, format = inputs
        rows = mx.arange(len(experts))
        x = x[:, 0].astype(mx.float32)
        return reference.gather_quantized_matmul(x, w, scales, biases, rows, experts, **format)[:, None]


class Pair(NamedTuple):
    """x `[M, K]` and two packed matrices `[N, K]` of one format: words, scales, and biases or None."""

    x: mx.array
    gate: tuple
    up: tuple
    format: dict


class GateUp(QuantizedMatmul):
    """silu(x gateᵀ) * (x upᵀ). N and K are those of either matrix."""

    name = "gate_up"

    def nbytes(self, key: Key) -> int:
        return 2 * super().nbytes(key)

    def tolerance(self, key: Key) -> float:
        # Four roundings: two products, silu, and their product.
        return 4 * super().tolerance(key)

    def inputs(self, key: Key, rows: int, seed: int, exact: bool = True) -> Pair:
        gate, up = (super(GateUp, self).inputs(key, rows, 2 * seed + i, exact) for i in (0, 1))
        return Pair(gate.x / key["K"] ** 0.5, gate[1:4], up[1:4], gate.format)

    def run(self, variant: str, inputs: Pair) -> mx.array:
        x, gate, up, format = inputs
        if variant == STOCK:
            return swiglu(*(mx.quantized_matmul(x, *matrix, transpose=True, **format) for matrix in (gate, up)))
        return gated_quantized_matmul(x, gate, up, variant=variant, kernel=self.factory, **format)

    def reference(self, inputs: Pair) -> mx.array:
        x, gate, up, format = inputs
        x = x.astype(mx.float32)
        gate, up = (reference.quantized_matmul(x, *matrix, **format) for matrix in (gate, up))
        return gate * mx.sigmoid(gate) * up


QUANTIZED_MATMUL, GATE_UP, EXPERTS = QuantizedMatmul(), GateUp(), Experts()
OPERATORS: tuple[Operator, ...] = (
    QUANTIZED_MATMUL,
    GATE_UP,
    EXPERTS,
    GATED_DELTA,
    GATED_DELTA_PREFILL,
    ATTENTION,
    DRAFT_HEAD,
    ACCEPT,
)
