"""The layers of a DSpark drafter for Gemma 4 (DeepSpec's Gemma4DSparkModel): Gemma's own, around the drafter's keys."""

import mlx.core as mx
import mlx.nn as nn

from specmlx.drafters.block import MLP, Attention, Join
from specmlx.drafters.config import DrafterConfig


class Gemma4Attention(Attention):
    """Attention whose scale is 1; its values are normed, and may be the keys' projection before norm and rope."""

    def __init__(self, config: DrafterConfig):
        super().__init__(config)
        self.eps = config.rms_norm_eps
        self.scale = 1.0

    def keys_values(self, x: mx.array, positions: mx.array) -> tuple[mx.array, mx.array]:
        """See `block.Attention`."""
        B, T, _ = x.shape
        keys = self.k_proj(x).reshape(B, T, -1, self.head_dim)
        values = self.v_proj(x).reshape(B, T, -1, self.head_dim) if "v_proj" in self else keys
        values = mx.fast.rms_norm(values, None, self.eps)
        return self.rope(self.k_norm(keys), positions).transpose(0, 2, 1, 3), values.transpose(0, 2, 1, 3)


class Gemma4MLP(MLP):
    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.gelu_approx(self.gate_proj(x)) * self.up_proj(x))


class Gemma4Layer(nn.Module):
    """Norms before and after each half, and a scale of the whole."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        D, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Gemma4Attention(config)
        self.mlp = Gemma4MLP(config)
        self.input_layernorm = nn.RMSNorm(D, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(D, eps=eps)
        self.pre_feedforward_layernorm = nn.RMSNorm(D, eps=eps)
        self.post_feedforward_layernorm = nn.RMSNorm(D, eps=eps)
        self.layer_scalar = mx.ones((1,))

    def __call__(self, x: mx.array, positions: mx.array, join: Join, mask: mx.array) -> mx.array:
        h = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), positions, join, mask))
        r = self.mlp(self.pre_feedforward_layernorm(h))
        return (h + self.post_feedforward_layernorm(r)) * self.layer_scalar
