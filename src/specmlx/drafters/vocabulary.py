"""A drafter's head over a part of the target's vocabulary."""

import mlx.core as mx
import mlx.nn as nn

from specmlx.formats.scaled_linear import ScaledLinear


class DraftVocabulary:
    """The target's ids `[Vd]` that the rows of a drafter's head stand for."""

    def __init__(self, ids: mx.array, vocab_size: int):
        """Raises ValueError unless the ids are all different and in 0..vocab_size - 1."""
        found = ids.tolist()
        if outside := [i for i in found if not 0 <= i < vocab_size]:
            raise ValueError(f"the draft vocabulary has id {outside[0]}: the target's has {vocab_size}")
        if len(set(found)) < len(found):
            raise ValueError("the draft vocabulary has an id twice")
        self.ids = ids.astype(mx.int32)
        # The head's row of each of the target's ids; where there is none, the row behind the last.
        places = mx.full((vocab_size,), ids.size, dtype=mx.int32)
        self._places = mx.put_along_axis(places, self.ids, mx.arange(ids.size, dtype=mx.int32), axis=0)
        mx.eval(self.ids, self._places)

    def rows_of(self, ids: mx.array) -> mx.array:
        """The head's rows of those of the target's ids `[N]` that it has, `[at most N]`, in their order."""
        return mx.array([row for row in self._places[ids].tolist() if row < self.ids.size], dtype=mx.int32)

    def widen(self, logits: mx.array) -> mx.array:
        """Logits `[..., Vd]` as `[..., V]`, -inf where there is no row."""
        none = mx.full((*logits.shape[:-1], 1), -mx.inf, dtype=logits.dtype)
        return mx.take(mx.concatenate([logits, none], axis=-1), self._places, axis=-1)


def take_rows(layer: nn.Linear | nn.Embedding, ids: mx.array) -> nn.Module:
    """The head `[Vd, D]` that has the rows `ids` [Vd] of a head or of a tied table, quantized if that is.

    Raises ValueError for a layer of another kind.
    """
    if isinstance(layer, ScaledLinear):
        rows = ScaledLinear(layer.mode)
    elif isinstance(layer, (nn.QuantizedLinear, nn.QuantizedEmbedding)):
        # Its own first weights are replaced below.
        size = layer.group_size
        rows = nn.QuantizedLinear(2 * size, 8, bias=False, group_size=size, bits=layer.bits, mode=layer.mode)
    elif isinstance(layer, (nn.Linear, nn.Embedding)):
        rows = nn.Linear(1, ids.size, bias=False)
    else:
        raise ValueError(f"can't take rows of a {type(layer).__name__}: a shortlist needs a plain or quantized head")
    for name in layer:
        rows[name] = layer[name][ids] if layer[name].ndim else layer[name]
    mx.eval(rows.parameters())
    return rows


def dense_rows(layer: nn.Linear, ids: mx.array) -> mx.array:
    """Rows `[..., K]` of a plain or quantized layer `[N, K]` for ids `[...]`. Raises ValueError for another kind."""
    for kind, table in ((nn.QuantizedLinear, nn.QuantizedEmbedding), (nn.Linear, nn.Embedding)):
        if isinstance(layer, kind):
            return table.__call__(layer, ids)
    raise ValueError(f"can't take rows of a {type(layer).__name__}: leave draft_markov_top_k out")
