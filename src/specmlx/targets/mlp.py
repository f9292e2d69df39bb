"""The MLPs of the hybrids, dense and mixtures of experts, with mlx-lm's names and arithmetic."""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchGLU

from specmlx.kernels.linear import GatedMLP
from specmlx.targets.config import HybridConfig


class SparseMLP(nn.Module):
    """The top-k experts by a softmax router, and a shared expert behind a sigmoid gate of its own."""

    def __init__(self, config: HybridConfig):
        super().__init__()
        dims = config.hidden_size
        self.top_k = config.num_experts_per_tok
        self.norm_topk_prob = config.norm_topk_prob
        self.gate = nn.Linear(dims, config.num_experts, bias=False)
        self.switch_mlp = SwitchGLU(dims, config.moe_intermediate_size, config.num_experts)
        self.shared_expert = GatedMLP(dims, config.shared_expert_intermediate_size)
        self.shared_expert_gate = nn.Linear(dims, 1, bias=False)

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """Rows `[..., D]`, plus `residual`."""
        gates = mx.softmax(self.gate(x), axis=-1, precise=True)
        experts = mx.stop_gradient(mx.argpartition(gates, kth=-self.top_k, axis=-1)[..., -self.top_k :])
        scores = mx.take_along_axis(gates, experts, axis=-1)
        if self.norm_topk_prob:
            scores = scores / scores.sum(axis=-1, keepdims=True)
        y = (self.switch_mlp(x, experts) * scores[..., None]).sum(axis=-2)
        y = y + mx.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return y if residual is None else residual + y


def make_mlp(config: HybridConfig, index: int) -> GatedMLP | SparseMLP:
    """Layer `index`'s MLP."""
    return SparseMLP(config) if config.has_experts(index) else GatedMLP(config.hidden_size, config.intermediate_size)
