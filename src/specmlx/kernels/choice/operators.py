"""The operators: the products, whose kernels are raced, and those with one kernel, which serves where it is right."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import mlx.core as mx
from mlx_lm.models.activations import swiglu

from specmlx.kernels import accept, attention, draft_head, gated_delta
from specmlx.kernels.attention import Span, Stored
from specmlx.kernels.choice.operator import METAL, REFERENCE, STOCK, TOGETHER, Key, Operator
from specmlx.kernels.draft_head import Candidates
from specmlx.kernels.gated_delta import Tape
from specmlx.kernels.quantized_matmul import (
    Matrix,
    gated_quantized_matmul,
    gather_by_expert,
    quantized_matmul,
    reference,
)
from specmlx.kernels.quantized_matmul.metal import scales_outside
from specmlx.kernels.tuning import tuning


class Product(NamedTuple):
    """x `[M, K]`, a packed matrix `[N, K]`, or those of experts, and what else an operator takes."""

    x: mx.array
    matrix: Matrix
    other: mx.array | Matrix | None = None


class QuantizedMatmul(Operator):
    """x times a packed matrix; with another input, a residual `[M, N]`, the product plus that too.

    Keys: N, K, mode, bits, group_size, dtype.
    """

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

    def inputs(self, key: Key, rows: int, seed: int, exact: bool = True) -> Product:
        N, K, dtype = key["N"], key["K"], getattr(mx, key["dtype"])
        format = {name: key[name] for name in ("group_size", "bits", "mode")}
        # Some of many rows over and over, since to draw and quantize them all would take longer than the race.
        x, some, residual = _normal(seed, dtype, (rows, K), (min(N, 1024), K), (rows, N))
        packed = (part[mx.arange(N) % len(some)] for part in mx.quantize(some, **format))
        return Product(x, Matrix(*packed, **format), 8 * residual if exact else None)

    def run(self, variant: str, inputs: Product) -> mx.array:
        x, matrix, residual = inputs
        y = self.product(variant, x, matrix)
        if residual is None:
            return y
        ours = variant not in (STOCK, REFERENCE)
        return mx.concatenate([y, self.product(variant, x, matrix, residual) if ours else y + residual], axis=-1)

    def product(self, variant: str, x: mx.array, matrix: Matrix, residual: mx.array | None = None) -> mx.array:
        """One product, in float32 by the reference."""
        if variant == REFERENCE:
            return reference.quantized_matmul(x.astype(mx.float32), matrix)
        if variant == STOCK:
            return mx.quantized_matmul(x, *matrix[:3], transpose=True, **matrix.format)
        return quantized_matmul(x, matrix, variant, residual=residual, factory=self.factory)


class Experts(QuantizedMatmul):
    """Rows `[P, 1, K]` times the packed matrices of their experts, the other input. One key more, E; rows are pairs."""

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

    def inputs(self, key: Key, rows: int, seed: int, exact: bool = True) -> Product:
        E, N = key["E"], key["N"]
        x, matrix, _ = super().inputs({**key, "N": E * N}, rows, seed, exact)
        parts = (None if part is None else part.reshape(E, N, -1) for part in matrix[:3])
        experts = mx.random.randint(0, E, (rows,), key=mx.random.key(seed + 1))
        return Product(x[:, None], Matrix(*parts, **matrix.format), experts)

    def run(self, variant: str, inputs: Product) -> mx.array:
        x, matrix, experts = inputs
        if variant == REFERENCE:
            x = x[:, 0].astype(mx.float32)
            return reference.gather_quantized_matmul(x, matrix, mx.arange(len(x)), experts)[:, None]
        if variant == STOCK:
            return mx.gather_qmm(x, *matrix[:3], rhs_indices=experts, transpose=True, **matrix.format)
        return gather_by_expert(x, matrix, experts, factory=self.factory)


class GateUp(QuantizedMatmul):
    """silu(x gateᵀ) * (x upᵀ), up the other input. N and K are those of either matrix."""

    name = "gate_up"
    roundings = 4  # two products, silu, and their product

    def nbytes(self, key: Key) -> int:
        return 2 * super().nbytes(key)

    def inputs(self, key: Key, rows: int, seed: int, exact: bool = True) -> Product:
        gate, up = (super(GateUp, self).inputs(key, rows, 2 * seed + i, exact) for i in (0, 1))
        return Product(gate.x / key["K"] ** 0.5, gate.matrix, up.matrix)

    def run(self, variant: str, inputs: Product) -> mx.array:
        x, *pair = inputs
        if variant in (STOCK, REFERENCE):
            gate, up = (self.product(variant, x, matrix) for matrix in pair)
            return swiglu(gate, up) if variant == STOCK else gate * mx.sigmoid(gate) * up
        return gated_quantized_matmul(x, *pair, variant, factory=self.factory)


def _normal(seed: int, dtype: mx.Dtype, *shapes: tuple[int, ...]) -> Iterator[mx.array]:
    keys = mx.random.split(mx.random.key(seed), len(shapes))
    return (mx.random.normal(shape, key=key).astype(dtype) for shape, key in zip(shapes, keys, strict=True))


def _joined(arrays: Iterable[mx.array]) -> mx.array:
    """All values of several results, in float32."""
    return mx.concatenate([x.reshape(-1).astype(mx.float32) for x in arrays])


class GatedDelta(Operator):
    """Fold of two tape rows and a pass of rows. Keys: Hk, Hv, Dk, Dv, dtype."""

    name = "gated_delta"

    def inputs(self, key: Key, rows: int, seed: int, exact: bool = True) -> tuple:
        Hk, Hv, Dk, Dv = (key[name] for name in ("Hk", "Hv", "Dk", "Dv"))
        dtype, heads, values = getattr(mx, key["dtype"]), (1, rows, Hk, Dk), (1, rows, Hv, Dv)
        S, delta, g, *keys = _normal(seed, mx.float32, (1, Hv, Dv, Dk), values, (1, rows, Hv), heads, heads, heads)
        before, q, k = ((x / mx.linalg.norm(x, axis=-1, keepdims=True)).astype(dtype) for x in keys)
        v, beta = _normal(seed + 1, dtype, values, (1, rows, Hv))
        g = mx.sigmoid(3 + g)
        return S, Tape(before, delta, g), mx.array([min(2, rows)], dtype=mx.int32), q, k, v, g, mx.sigmoid(beta)

    def run(self, variant: str, inputs: tuple) -> mx.array:
        S, y, new = self.function(variant, gated_delta, "advance")(*inputs)
        return _joined([S, y, new.delta])


class GatedDeltaPrefill(GatedDelta):
    """Rows that are all kept. Keys as of `GatedDelta`, dtype float32.

    Stock is mlx's operator, which serves where it is right: in another order of sums float32 is off by 1e-6 of the
    largest value, with the tf32 of tensor units by 2e-4.
    """

    name = "gated_delta_prefill"
    rows = (24, 333)

    def variants(self, key: Key) -> tuple[str, ...]:
        return (STOCK, METAL)

    def inputs(self, key: Key, rows: int, seed: int, exact: bool = True) -> tuple:
        S, _, _, *given = super().inputs(key, rows, seed, exact)
        return S, *given

    def run(self, variant: str, inputs: tuple) -> mx.array:
        S, *rows = inputs
        if variant == STOCK:
            return _joined(mx.fast.gated_delta_update(*rows, S))
        return _joined(self.function(variant, gated_delta, "prefill" if variant == METAL else "steps")(S, *rows)[:2])


class Attention(Operator):
    """Rows over a buffer of keys and values. Keys: Hq, Hkv, D, kv ("plain", "int8", "affine4", "affine8"), dtype."""

    name = "attention"

    def inputs(self, key: Key, rows: int, seed: int, exact: bool = True) -> tuple[mx.array, Stored, Stored]:
        keys = (1, key["Hkv"], 333, key["D"])
        q, *kv = _normal(seed, getattr(mx, key["dtype"]), (1, key["Hq"], rows, key["D"]), keys, keys)
        return q, *(self.stored(x, key["kv"]) for x in kv)

    def stored(self, x: mx.array, kv: str) -> Stored:
        """Keys or values `[B, Hkv, capacity, D]` in one of the key's formats."""
        if kv == "plain":
            return Stored(x)
        if kv == "int8":
            scales = mx.abs(x).max(axis=-1, keepdims=True).astype(mx.float32) / 127
            return Stored(mx.round(x / scales).astype(mx.int8), scales, bits=8)
        bits = int(kv.removeprefix("affine"))
        return Stored(*mx.quantize(x, group_size=32, bits=bits), bits=bits)

    def run(self, variant: str, inputs: tuple[mx.array, Stored, Stored]) -> mx.array:
        q, keys, values = inputs
        length, (*_, T, D) = keys.data.shape[2], q.shape
        run = self.function(variant, attention, "attention" if variant == METAL else "by_formula")
        return run(q, keys, values, Span(mx.array([length - T], dtype=mx.int32), length), D**-0.5)


class DraftHead(Operator):
    """Top candidates, walk, best path and Markov chain of 3 slots. Keys: dtype."""

    name = "draft_head"
    roundings = 0  # ids, and logits as they were read

    def inputs(self, key: Key, rows: int, seed: int, exact: bool = True) -> tuple:
        logits, w1, w2 = _normal(seed, getattr(mx, key["dtype"]), (1, 3, 1000), (1000, 64), (1000, 64))
        chained = 3 * logits, w1, w2, mx.array([7], dtype=mx.int32)
        # Candidates of one run: of equal values other ids are as right.
        return *chained, Candidates(*draft_head.reference.top_k(chained[0], 4), *chained[1:])

    def run(self, variant: str, inputs: tuple) -> mx.array:
        *chained, candidates = inputs
        names = ("top_k", "chain", "walk", "path")
        top_k, chain, walk, path = (self.function(variant, draft_head, name) for name in names)
        values, _ = top_k(chained[0], 4)
        return _joined([mx.sort(values, axis=-1), chain(*chained)[0], walk(candidates)[0], path(candidates)])


class Accept(Operator):
    """Match of the best tokens and rejection sampling. Keys: dtype."""

    name = "accept"
    roundings = 0  # ids

    def inputs(self, key: Key, rows: int, seed: int, exact: bool = True) -> tuple:
        V = 1000
        scores, other = (4 * x for x in _normal(seed, mx.float32, (1, rows, V), (1, rows, V)))
        scores = scores.astype(getattr(mx, key["dtype"]))
        p, q = (mx.softmax(x.astype(mx.float32), axis=-1) for x in (scores, other))
        # Half of the proposal is the target's own choice.
        best = mx.argmax(scores, axis=-1)[:, :-1].astype(mx.int32)
        tokens = mx.where(mx.arange(rows - 1) < (rows - 1) // 2, best, 5)
        u = mx.random.uniform(shape=(1, rows - 1), key=mx.random.key(seed + 2))
        return tokens, scores, p, q[:, :-1], u, mx.random.gumbel((1, V), key=mx.random.key(seed + 3))

    def run(self, variant: str, inputs: tuple) -> mx.array:
        tokens, scores, p, q, u, noise = inputs
        matched = self.function(variant, accept, "match_best")(tokens, scores)
        return _joined([*matched, *self.function(variant, accept, "rejection")(tokens, q, p, u, noise)])


QUANTIZED_MATMUL, GATE_UP, EXPERTS = QuantizedMatmul(), GateUp(), Experts()
GATED_DELTA, GATED_DELTA_PREFILL = GatedDelta(), GatedDeltaPrefill()
ATTENTION, DRAFT_HEAD, ACCEPT = Attention(), DraftHead(), Accept()
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
