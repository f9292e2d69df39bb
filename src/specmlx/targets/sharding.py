"""One process's part of a hybrid, the layers split by heads and columns as mlx-lm's `qwen3_5.Model.shard` splits them.

Both mixers keep their share of the heads, the MLPs and every expert their share of the inner columns, so that a layer's
output is a sum over the processes, taken twice a layer. Embeddings, norms, routers and the head are whole everywhere: a
head in parts would have to send logits `[T, V]` in each round, and drafters read it too.
"""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from specmlx.formats.scaled_linear import BlockScaledLinear, ScaledLinear
from specmlx.kernels.linear import GatedMLP
from specmlx.targets.attention import Attention
from specmlx.targets.config import HybridConfig
from specmlx.targets.gated_delta import FusedGatedDeltaNet, GatedDeltaNet
from specmlx.targets.hybrid import Model
from specmlx.targets.mlp import SparseMLP

_HEADS = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
Span = tuple[int, int]
Change = tuple[nn.Module, dict[str, mx.array]]

_PACKED = (nn.QuantizedLinear, QuantizedSwitchLinear, ScaledLinear)


def shard(model: Model, group: mx.distributed.Group) -> None:
    """Keep this process's part of the model, in place; nothing is evaluated.

    Raises ValueError where heads, columns or groups of quantized weights don't divide; the model is then of no use.
    """
    rank, size = group.rank(), group.size()
    check(model.config, size)
    changes: list[Change] = []
    for i, layer in enumerate(model.layers):
        parts = _Parts(rank, size, f"layers.{i}")
        changes += _mixer(layer.linear_attn if layer.is_linear else layer.self_attn, parts)
        changes += _mlp(layer.mlp, parts)
    for module, arrays in changes:
        module.update(arrays)
    for layer in model.layers:
        layer.sharding_group = group
        if layer.is_linear:
            _fewer_heads(layer.linear_attn, size)
        else:
            attention = layer.self_attn
            attention.num_attention_heads //= size
            attention.num_key_value_heads = max(1, attention.num_key_value_heads // size)
    model.sharding_group = group


def check(config: HybridConfig, size: int) -> None:
    """Raise ValueError, in one line with all values, where a model can't be split over `size` processes."""
    names = ["linear_num_key_heads", "linear_num_value_heads", "num_attention_heads"]
    experts = [config.has_experts(i) for i in range(config.num_hidden_layers)]
    if not all(experts):
        names.append("intermediate_size")
    if any(experts):
        names += ["moe_intermediate_size", "shared_expert_intermediate_size"]
    odd = [f"{name} {getattr(config, name)}" for name in names if getattr(config, name) % size]
    kv = config.num_key_value_heads
    # Fewer heads than processes: each is kept by several.
    if kv % size and size % kv:
        odd.append(f"num_key_value_heads {kv}")
    if odd:
        raise ValueError(f"the model can't be split over {size} processes, which don't divide its {', '.join(odd)}")


def shard_any(model: nn.Module, config: dict[str, Any], group: mx.distributed.Group) -> None:
    """Keep this process's part of a model of mlx-lm's by its own `shard`, in place; nothing is evaluated.

    Raises ValueError for a model without one, and where heads or columns don't divide; it is then of no use.
    """
    size = group.size()
    if not hasattr(model, "shard"):
        raise ValueError(f"{config['model_type']} models can't run in several processes: mlx-lm can't split them")
    text = {**config, **(config.get("text_config") or {})}
    # mlx-lm rounds heads down without a word.
    odd = [f"{name} {text[name]}" for name in _HEADS if isinstance(text.get(name), int) and text[name] % size]
    if odd:
        raise ValueError(f"the model can't be split over {size} processes, which don't divide its {', '.join(odd)}")
    try:
        model.shard(group)
    except (ValueError, AssertionError) as error:
        what = " ".join(str(error).split())
        raise ValueError(f"mlx-lm can't split the model over {size} processes: {what}") from None


class _Parts:
    """What one process keeps of the layers' arrays; where it is refused, it is by a layer's name."""

    def __init__(self, rank: int, size: int, where: str):
        self.rank = rank
        self.size = size
        self.where = where

    def span(self, length: int, start: int = 0) -> Span:
        """This process's share of so many rows or columns, `start` apart."""
        return start + length * self.rank // self.size, start + length * (self.rank + 1) // self.size

    def rows(self, layer: nn.Module, *spans: Span) -> Change:
        """The outputs in the spans."""
        if isinstance(layer, BlockScaledLinear):
            return self._block_rows(layer, spans)
        self._check_kind(layer)
        parts = {}
        for name, x in layer.items():
            if name == "bias" or (name == "output_scale" and x.size > 1 and x.shape[-1] > 1):
                parts[name] = _taken(x, spans, -1)
            elif name != "output_scale":
                parts[name] = _taken(x, spans, -2)
        return layer, parts

    def columns(self, layer: nn.Module, span: Span) -> Change:
        """The inputs in the span; the bias, which the sum over the processes has to have once, is the first one's."""
        self._check_kind(layer)
        blocks = isinstance(layer, BlockScaledLinear)
        inputs = layer.weight.shape[-1]
        if isinstance(layer, _PACKED) or blocks:
            inputs = inputs * 32 // layer.bits
        parts = {}
        for name, x in layer.items():
            if name == "bias":
                parts[name] = x if self.rank == 0 else mx.zeros_like(x)
            elif name != "output_scale":
                parts[name] = _taken(x, [self._scaled(layer, name, span, inputs, x.shape[-1])], -1)
        return layer, parts

    def _scaled(self, layer: nn.Module, name: str, span: Span, inputs: int, length: int) -> Span:
        """The span in an array that has `length` elements for `inputs` columns."""
        if any(at * length % inputs for at in span):
            each = inputs // length if length < inputs else 1
            raise ValueError(
                f"the model can't be split over {self.size} processes: {self.where} has a {type(layer).__name__} with "
                f"{inputs} inputs whose {name} are in groups of {each}"
            )
        return span[0] * length // inputs, span[1] * length // inputs

    def _block_rows(self, layer: BlockScaledLinear, spans: tuple[Span, ...]) -> Change:
        size = layer.weight.shape[-2]
        ends = [end for span in spans for end in span if end != layer.rows]
        if any(end % size for end in ends):
            raise ValueError(
                f"the model can't be split over {self.size} processes: {self.where} has FP8 weights with a scale for "
                f"{size} of {layer.rows} rows"
            )
        blocks = [(a // size, -(-b // size)) for a, b in spans]
        parts = {name: _taken(x, blocks, -2 if name == "block_scales" else -3) for name, x in layer.items()}
        if "bias" in layer:
            parts["bias"] = _taken(layer.bias, spans, -1)
        layer.rows = sum(b - a for a, b in spans)
        return layer, parts

    def _check_kind(self, layer: nn.Module) -> None:
        if not isinstance(layer, (nn.Linear, SwitchLinear, BlockScaledLinear, *_PACKED)):
            raise ValueError(f"{self.where} has a {type(layer).__name__}, which can't be split over processes")


def _mixer(mixer: GatedDeltaNet | Attention, parts: _Parts) -> Iterator[Change]:
    if isinstance(mixer, Attention):
        width, heads = mixer.num_attention_heads * mixer.head_dim, mixer.num_key_value_heads
        yield parts.rows(mixer.q_proj, parts.span(2 * width))
        first, last = parts.span(heads)
        kv = first * mixer.head_dim, max(last, first + 1) * mixer.head_dim
        yield parts.rows(mixer.k_proj, kv)
        yield parts.rows(mixer.v_proj, kv)
        yield parts.columns(mixer.o_proj, parts.span(width))
        return
    keys, values, heads = mixer.key_dim, mixer.value_dim, mixer.num_v_heads
    qkv = parts.span(keys), parts.span(keys, keys), parts.span(values, 2 * keys)
    if isinstance(mixer, FusedGatedDeltaNet):
        yield parts.rows(mixer.in_proj_qkvz, parts.span(2 * keys + 2 * values))
        yield parts.rows(mixer.in_proj_ba, parts.span(2 * heads))
    else:
        yield parts.rows(mixer.in_proj_qkv, *qkv)
        yield parts.rows(mixer.in_proj_z, parts.span(values))
        yield parts.rows(mixer.in_proj_b, parts.span(heads))
        yield parts.rows(mixer.in_proj_a, parts.span(heads))
    yield mixer.conv1d, {"weight": _taken(mixer.conv1d.weight, qkv, 0)}
    yield mixer, {name: _taken(mixer[name], [parts.span(heads)], 0) for name in ("A_log", "dt_bias")}
    yield parts.columns(mixer.out_proj, parts.span(values))


def _fewer_heads(mixer: GatedDeltaNet, size: int) -> None:
    mixer.num_k_heads //= size
    mixer.num_v_heads //= size
    mixer.key_dim //= size
    mixer.value_dim //= size
    mixer.conv_dim //= size
    mixer.conv1d.groups //= size


def _mlp(mlp: GatedMLP | SparseMLP, parts: _Parts) -> Iterator[Change]:
    if isinstance(mlp, SparseMLP):
        yield from _gated(mlp.shared_expert, parts)
        yield from _gated(mlp.switch_mlp, parts)
    else:
        yield from _gated(mlp, parts)


def _gated(mlp: nn.Module, parts: _Parts) -> Iterator[Change]:
    outputs = _outputs(mlp.gate_proj)
    yield parts.rows(mlp.gate_proj, parts.span(outputs))
    yield parts.rows(mlp.up_proj, parts.span(outputs))
    yield parts.columns(mlp.down_proj, parts.span(outputs))


def _outputs(layer: nn.Module) -> int:
    return layer.rows if isinstance(layer, BlockScaledLinear) else layer.weight.shape[-2]


def _taken(x: mx.array, spans: list[Span] | tuple[Span, ...], axis: int) -> mx.array:
    """The spans of an axis one after the other, in an array of their own: the whole one can go."""
    before = (slice(None),) * (axis % x.ndim)
    parts = [x[(*before, slice(a, b))] for a, b in spans]
    return mx.contiguous(parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=axis))
