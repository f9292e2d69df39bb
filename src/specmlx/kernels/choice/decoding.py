"""The operators beside the products: each has one kernel, which serves all row counts where it is right."""

from typing import Any

import mlx.core as mx

from specmlx.kernels.accept import metal as accept_metal
from specmlx.kernels.accept import reference as accept_reference
from specmlx.kernels.attention import metal as attention_metal
from specmlx.kernels.attention import reference as attention_reference
from specmlx.kernels.attention.reference import Stored
from specmlx.kernels.choice.operator import METAL, STOCK, Key, Operator
from specmlx.kernels.draft_head import metal as head_metal
from specmlx.kernels.draft_head import reference as head_reference
from specmlx.kernels.gated_delta import metal as delta_metal
from specmlx.kernels.gated_delta import reference as delta_reference
from specmlx.kernels.gated_delta.reference import Tape


def normal(seed: int, *shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def joined(arrays: Any) -> mx.array:
    """All values of several results, in float32."""
    return mx.concatenate([x.reshape(-1).astype(mx.float32) for x in arrays])


class GatedDelta(Operator):
    """Fold of two tape rows and a pass of rows. Keys: Hk, Hv, Dk, Dv, dtype."""

    name = "gated_delta"

    def inputs(self, key: Key, rows: int, seed: int, exact: bool = True) -> tuple:
        Hk, Hv, Dk, Dv, dtype = (key[name] for name in ("Hk", "Hv", "Dk", "Dv", "dtype"))

        def keys(seed: int) -> mx.array:
            x = normal(seed, 1, rows, Hk, Dk)
            return (x / mx.linalg.norm(x, axis=-1, keepdims=True)).astype(getattr(mx, dtype))

        S, g = normal(seed + 4, 1, Hv, Dv, Dk), mx.sigmoid(3 + normal(seed + 5, 1, rows, Hv))
        v = normal(seed + 6, 1, rows, Hv, Dv).astype(getattr(mx, dtype))
        beta = mx.sigmoid(normal(seed + 7, 1, rows, Hv)).astype(v.dtype)
        tape = Tape(keys(seed), normal(seed + 1, 1, rows, Hv, Dv), g)
        return S, tape, mx.array([min(2, rows)], dtype=mx.int32), keys(seed + 2), keys(seed + 3), v, g, beta

    def run(self, variant: str, inputs: tuple) -> mx.array:
        S, tape, count, *rows = inputs
        if variant == METAL:
            S, y, new = delta_metal.advance(S, tape, count, *rows, factory=self.factory)
        else:
            S = delta_reference.fold(S, tape, count)
            y, _, new = delta_reference.steps(S, *rows)
        return joined([S, y, new.delta])


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
        if variant == METAL:
            return joined(delta_metal.prefill(S, *rows, factory=self.factory))
        if variant == STOCK:
            return joined(mx.fast.gated_delta_update(*rows, S))
        return joined(delta_reference.steps(S, *rows)[:2])


class Attention(Operator):
    """Rows over a buffer of keys and values. Keys: Hq, Hkv, D, kv ("plain", "int8", "affine4", "affine8"), dtype."""

    name = "attention"

    def inputs(self, key: Key, rows: int, seed: int, exact: bool = True) -> tuple:
        dtype = getattr(mx, key["dtype"])

        def stored(seed: int) -> Stored:
            x = normal(seed, 1, key["Hkv"], 333, key["D"]).astype(dtype)
            if key["kv"] == "plain":
                return Stored(x)
            if key["kv"] == "int8":
                scales = mx.abs(x).max(axis=-1, keepdims=True).astype(mx.float32) / 127
                return Stored(mx.round(x / scales).astype(mx.int8), scales, bits=8)
            bits = int(key["kv"].removeprefix("affine"))
            return Stored(*mx.quantize(x, group_size=32, bits=bits), bits=bits)

        return normal(seed, 1, key["Hq"], rows, key["D"]).astype(dtype), stored(seed + 1), stored(seed + 2)

    def run(self, variant: str, inputs: tuple) -> mx.array:
        q, keys, values = inputs
        length, scale = keys.data.shape[2], q.shape[-1] ** -0.5
        start = mx.array([length - q.shape[2]], dtype=mx.int32)
        if variant == METAL:
            return attention_metal.attention(q, keys, values, start, length, scale, factory=self.factory)
        return attention_reference.attention(q, keys, values, start, scale)


class DraftHead(Operator):
    """Top candidates, walk, best path and Markov chain of 3 slots. Keys: dtype."""

    name = "draft_head"

    def tolerance(self, key: Key) -> float:
        # Ids, and logits as they were read.
        return 0.0

    def inputs(self, key: Key, rows: int, seed: int, exact: bool = True) -> tuple:
        V, R = 1000, 64
        logits = (3 * normal(seed, 1, 3, V)).astype(getattr(mx, key["dtype"]))
        w1, w2 = (normal(seed + i, V, R).astype(logits.dtype) for i in (1, 2))
        return logits, w1, w2, mx.array([7], dtype=mx.int32)

    def run(self, variant: str, inputs: tuple) -> mx.array:
        logits, w1, w2, anchor = inputs
        head, made = (head_metal, {"factory": self.factory}) if variant == METAL else (head_reference, {})
        values, ids = head.top_k(logits, 4, **made)
        order = mx.argsort(-values, axis=-1)
        values, ids = (mx.take_along_axis(x, order, axis=-1) for x in (values, ids))
        # The candidates of the readable form: of equal values other ids are as right.
        _, ids = head_reference.top_k(logits, 4)
        tokens, _ = head.chain(logits, w1, w2, anchor, **made)
        walked, _ = head.walk(values, ids, w1, w2, anchor, **made)
        return joined([values, tokens, walked, head.path(values, ids, w1, w2, anchor, **made)])


class Accept(Operator):
    """Match of the best tokens and rejection sampling. Keys: dtype."""

    name = "accept"

    def tolerance(self, key: Key) -> float:
        # Ids, and logits as they were read.
        return 0.0

    def inputs(self, key: Key, rows: int, seed: int, exact: bool = True) -> tuple:
        V = 1000
        scores = (4 * normal(seed, 1, rows, V)).astype(getattr(mx, key["dtype"]))
        p, q = mx.softmax(scores.astype(mx.float32), axis=-1), mx.softmax(4 * normal(seed + 1, 1, rows, V), axis=-1)
        # Half of the proposal is the target's own choice.
        best = mx.argmax(scores, axis=-1)[:, :-1].astype(mx.int32)
        tokens = mx.where(mx.arange(rows - 1) < (rows - 1) // 2, best, 5)
        u = mx.random.uniform(shape=(1, rows - 1), key=mx.random.key(seed + 2))
        return tokens, scores, p, q[:, :-1], u, mx.random.gumbel((1, V), key=mx.random.key(seed + 3))

    def run(self, variant: str, inputs: tuple) -> mx.array:
        tokens, scores, p, q, u, noise = inputs
        if variant == METAL:
            matched = accept_metal.match(tokens, scores, factory=self.factory)
            kept = accept_metal.rejection(tokens, q, p, u, noise, factory=self.factory)
        else:
            matched = accept_reference.match(tokens, mx.argmax(scores, axis=-1))
            kept = accept_reference.rejection(tokens, q, p, u, noise)
        return joined([*matched, *kept])


GATED_DELTA, GATED_DELTA_PREFILL = GatedDelta(), GatedDeltaPrefill()
ATTENTION, DRAFT_HEAD, ACCEPT = Attention(), DraftHead(), Accept()
