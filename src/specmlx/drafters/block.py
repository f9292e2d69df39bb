"""The trunk that DFlash and DSpark share: a block of rows attends to the target's taps and to itself."""

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from specmlx.drafters.config import DrafterConfig
from specmlx.formats.rope import attention_factor, periods
from specmlx.kernels.linear import GatedMLP, added, products

# How the keys and values `[B, H, R, D]` of a block's own rows meet those of the context.
Join = Callable[[mx.array, mx.array], tuple[mx.array, mx.array]]


class Rotary:
    """Turns rows to absolute positions: NeoX halves or interleaved pairs.

    `factor` is what YaRN multiplies cos and sin by, else 1: the caller applies it.
    """

    def __init__(self, dims: int, rope: dict[str, Any], interleaved: bool = False):
        self.dims, self.pairs = dims, interleaved
        self.factor, self.freqs = attention_factor(rope), periods(rope, dims)

    def __call__(self, x: mx.array, positions: mx.array) -> mx.array:
        """x `[B, T, H, D]` turned to `positions` `[B, T]` int32."""
        B, T, H, D = x.shape
        # Every row is a sequence of its own, so that it has an offset of its own; nothing is copied for that.
        rows, at = x.reshape(B * T, H, 1, D), positions.reshape(-1)
        rows = mx.fast.rope(rows, self.dims, traditional=self.pairs, base=None, scale=1.0, offset=at, freqs=self.freqs)
        return rows.reshape(B, T, H, D)


class Attention(nn.Module):
    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.head_dim, self.gated, bias = config.head_dim, config.gated_attention, config.attention_bias
        D, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(D, heads * self.head_dim * (2 if self.gated else 1), bias=bias)
        self.k_proj = nn.Linear(D, kv_heads * self.head_dim, bias=bias)
        if not config.attention_k_eq_v:
            self.v_proj = nn.Linear(D, kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * self.head_dim, D, bias=bias)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.rope = Rotary(config.rope_dims or self.head_dim, config.rope_scaling, not config.rope_is_neox_style)
        # YaRN scales cos and sin of queries and keys alike, so their products by its square.
        self.scale = self.head_dim**-0.5 * self.rope.factor**2

    def keys_values(self, x: mx.array, positions: mx.array) -> tuple[mx.array, mx.array]:
        """Keys (normed, roped) and values `[B, H, T, D]` of rows `[B, T, hidden]`, context or block alike."""
        return self._keys_values(products(x, *self._sources()), positions)

    def _sources(self) -> list[nn.Module]:
        return [self.k_proj, self.v_proj] if "v_proj" in self else [self.k_proj]

    def _keys_values(self, projected: list[mx.array], positions: mx.array) -> tuple[mx.array, mx.array]:
        keys, values = projected[0], projected[-1]
        B, T, _ = keys.shape
        keys = self.rope(self.k_norm(keys.reshape(B, T, -1, self.head_dim)), positions)
        return keys.transpose(0, 2, 1, 3), values.reshape(B, T, -1, self.head_dim).transpose(0, 2, 1, 3)

    def __call__(
        self, x: mx.array, positions: mx.array, join: Join, mask: mx.array, residual: mx.array | None = None
    ) -> mx.array:
        """Rows `[B, R, hidden]`, plus `residual`."""
        B, R, _ = x.shape
        queries, *projected = products(x, self.q_proj, *self._sources())
        if self.gated:
            # Head by head, queries and the gates beside them.
            queries, gate = mx.split(queries.reshape(B, R, -1, 2 * self.head_dim), 2, axis=-1)
        queries = self.q_norm(queries.reshape(B, R, -1, self.head_dim))
        queries = self.rope(queries, positions).transpose(0, 2, 1, 3)
        keys, values = join(*self._keys_values(projected, positions))
        o = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=self.scale, mask=mask)
        o = o.transpose(0, 2, 1, 3).reshape(B, R, -1)
        return added(residual, self.o_proj, o * mx.sigmoid(gate.reshape(B, R, -1)) if self.gated else o)


class Layer(nn.Module):
    attention, mlp_kind = Attention, GatedMLP

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.self_attn = self.attention(config)
        self.mlp = self.mlp_kind(config.hidden_size, config.intermediate_size)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def __call__(self, x: mx.array, positions: mx.array, join: Join, mask: mx.array) -> mx.array:
        h = self.self_attn(self.input_layernorm(x), positions, join, mask, residual=x)
        return self.mlp(self.post_attention_layernorm(h), residual=h)


class BlockTrunk(nn.Module):
    """A drafter's own weights, by the publishers' names (arXiv 2602.06036). Norms are plain: w, not 1 + w."""

    def __init__(self, config: DrafterConfig, layer: type[Layer] = Layer):
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = [layer(config) for _ in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.own_head:
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)

    @property
    def dtype(self) -> mx.Dtype:
        return self.norm.weight.dtype

    def project(self, features: mx.array) -> mx.array:
        """Taps `[B, S, F]` to context rows `[B, S, hidden]`: position-wise, so once per row."""
        return self.hidden_norm(self.fc(features.astype(self.dtype)))

    def hidden(
        self,
        block_embeddings: mx.array,
        block_positions: mx.array,
        context_features: mx.array,
        context_positions: mx.array,
        mask: mx.array,
        grad_checkpoint: bool = False,
    ) -> mx.array:
        """Normed rows `[B, R, hidden]` of blocks that attend to a context of taps; pure, differentiable.

        block_embeddings: `[B, R, hidden]`, the rows of one block or of many packed ones, scaled.
        block_positions, context_positions: `[B, R]` and `[B, S]` int32, absolute.
        context_features: `[B, S, F]`.
        mask: boolean `[B or 1, 1, R, S + R]`, True where a row may be seen: context keys first, then the
            block rows. What each layer's window and causality hide is taken out here.
        grad_checkpoint: gradients run each layer again instead of keeping what it computed.
        """
        positions = mx.concatenate([context_positions, block_positions], axis=1)
        windows, causal = self.config.windows, self.config.causal
        masks = {window: visible(mask, window, causal(window), block_positions, positions) for window in set(windows)}

        def run(layer: Layer, mask: mx.array, x: mx.array, context: mx.array) -> mx.array:
            before = layer.self_attn.keys_values(context, context_positions)

            def join(*own: mx.array) -> list[mx.array]:
                return [mx.concatenate(parts, axis=2) for parts in zip(before, own, strict=True)]

            return layer(x, block_positions, join, mask)

        x, context = block_embeddings.astype(self.dtype), self.project(context_features)
        for layer, window in zip(self.layers, windows, strict=True):
            step = partial(run, layer, masks[window])
            x = (nn.utils.checkpoint(layer, step) if grad_checkpoint else step)(x, context)
        return self.norm(x)


def visible(mask: mx.array, window: int | None, causal: bool, queries: mx.array, keys: mx.array) -> mx.array:
    """What is left of a mask `[B, 1, R, S]` in a layer, by the absolute positions `[B, R]` and `[B, S]`.

    A query at p sees c iff p - c < window (each query by its own position), and c <= p if causal.
    """
    if window is None and not causal:
        return mask
    distance = queries[:, None, :, None] - keys[:, None, None, :]
    mask = mask & (distance >= 0 if causal else -distance < window)
    return mask if window is None else mask & (distance < window)
