"""The layers of a DSpark drafter for Gemma 4 (DeepSpec's Gemma4DSparkModel): Gemma's own, around the drafter's keys."""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gemma3_text import MLP

from specmlx.drafters.block import Attention, Join, Layer
from specmlx.drafters.config import DrafterConfig
from specmlx.kernels.linear import products


class Gemma4Attention(Attention):
    """Attention whose scale is 1; its values are normed, and may be the keys' projection before norm and rope."""

    def __init__(self, config: DrafterConfig):
        super().__init__(config)
        self.eps = config.rms_norm_eps
        self.scale = 1.0

    def _keys_values(self, projected: list[mx.array], positions: mx.array) -> tuple[mx.array, mx.array]:
        keys, values = super()._keys_values(projected, positions)
        return keys, mx.fast.rms_norm(values, None, self.eps)


class Gemma4MLP(MLP):
    def __call__(self, x: mx.array) -> mx.array:
        gate, up = products(x, self.gate_proj, self.up_proj)
        return self.down_proj(nn.gelu_approx(gate) * up)


class Gemma4Layer(Layer):
    """Norms before and after each half, and a scale of the whole."""

    attention, mlp_kind = Gemma4Attention, Gemma4MLP

    def __init__(self, config: DrafterConfig):
        super().__init__(config)
        self.pre_feedforward_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_feedforward_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layer_scalar = mx.ones((1,))

    def __call__(self, x: mx.array, positions: mx.array, join: Join, mask: mx.array) -> mx.array:
        h = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), positions, join, mask))
        r = self.mlp(self.pre_feedforward_layernorm(h))
        return (h + self.post_feedforward_layernorm(r)) * self.layer_scalar
