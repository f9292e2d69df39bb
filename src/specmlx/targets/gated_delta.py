"""The Gated DeltaNet layer of Qwen3.5, with mlx-lm's names and arithmetic."""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.qwen3_next import Qwen3NextRMSNormGated as RMSNormGated

from specmlx.cache.recurrent import Recurrent
from specmlx.kernels.dispatch import kernel
from specmlx.kernels.gated_delta import key, prefill
from specmlx.kernels.linear import added, products
from specmlx.targets.config import HybridConfig


class GatedDeltaNet(nn.Module):
    operator = "gated_delta"

    def __init__(self, config: HybridConfig):
        super().__init__()
        self.num_k_heads = config.linear_num_key_heads
        self.num_v_heads = config.linear_num_value_heads
        self.head_k_dim = config.linear_key_head_dim
        self.head_v_dim = config.linear_value_head_dim
        self.key_dim = self.head_k_dim * self.num_k_heads
        self.value_dim = self.head_v_dim * self.num_v_heads
        self.conv_dim = 2 * self.key_dim + self.value_dim
        self.conv_kernel_size = config.linear_conv_kernel_dim

        self.conv1d = nn.Conv1d(
            self.conv_dim, self.conv_dim, kernel_size=self.conv_kernel_size, groups=self.conv_dim, bias=False
        )
        self._add_projections(config.hidden_size)
        self.dt_bias = mx.ones(self.num_v_heads)
        self.A_log = mx.log(mx.random.uniform(low=1e-3, high=16, shape=(self.num_v_heads,)))
        self.norm = RMSNormGated(self.head_v_dim, eps=config.rms_norm_eps)
        self.out_proj = nn.Linear(self.value_dim, config.hidden_size, bias=False)
        self.consistent = False

    def on_kernel(self, dtype: mx.Dtype) -> bool:
        """See `Served`."""
        S, k = self.empty(1, dtype).S, mx.zeros((1, 1, self.num_k_heads, self.head_k_dim))
        # What runs prompts is checked at the same time.
        prompts = kernel("gated_delta" if self.consistent else "gated_delta_prefill", key(S, k))
        served = kernel("gated_delta", key(S, k.astype(dtype))) is not None
        return served and (prompts is not None or not self.consistent)

    def _add_projections(self, dims: int) -> None:
        self.in_proj_qkv = nn.Linear(dims, self.conv_dim, bias=False)
        self.in_proj_z = nn.Linear(dims, self.value_dim, bias=False)
        self.in_proj_b = nn.Linear(dims, self.num_v_heads, bias=False)
        self.in_proj_a = nn.Linear(dims, self.num_v_heads, bias=False)

    def _inputs(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """q, k and v side by side `[B, T, C]`, z `[B, T, Hv Dv]`, b and a `[B, T, Hv]` of rows `[B, T, D]`."""
        return tuple(products(x, self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a))

    def empty(self, batch: int, dtype: mx.Dtype) -> Recurrent:
        """The state before the first row."""
        return Recurrent(
            mx.zeros((batch, self.num_v_heads, self.head_v_dim, self.head_k_dim), dtype=mx.float32),
            mx.zeros((batch, self.conv_kernel_size - 1, self.conv_dim), dtype=dtype),
        )

    def prefill(self, x: mx.array, state: Recurrent, residual: mx.array | None) -> tuple[mx.array, Recurrent]:
        """Rows `[B, T, D]` that are all kept, plus `residual`; `state` has no tape."""
        q, k, v, g, beta, conv_input, z = self._project(x, state.conv)
        y, S = prefill(state.S, q, k, v, g, beta, consistent=self.consistent, gradient=self.training)
        conv = mx.contiguous(conv_input[:, -(self.conv_kernel_size - 1) :])
        return self._output(y, z, residual), Recurrent(S, conv)

    def verify(
        self, x: mx.array, state: Recurrent, count: int | mx.array, residual: mx.array | None
    ) -> tuple[mx.array, Recurrent]:
        """Rows `[B, T, D]` of which none is kept yet, after the first `count` rows of the last pass were; see above."""
        conv = state.conv_after(count)
        q, k, v, g, beta, conv_input, z = self._project(x, conv)
        S, y, tape = state.advance(count, q, k, v, g, beta)
        conv_rows = conv_input[:, self.conv_kernel_size - 1 :]
        return self._output(y, z, residual), Recurrent(S, conv, tape, conv_rows)

    def _project(self, x: mx.array, conv: mx.array):
        B, T, _ = x.shape
        qkv, z, b, a = self._inputs(x)
        conv_input = mx.concatenate([conv, qkv], axis=1)
        q, k, v = mx.split(
            nn.silu(self._conv(conv_input, T) if self.training else self.conv1d(conv_input)),
            [self.key_dim, 2 * self.key_dim],
            axis=-1,
        )
        q = q.reshape(B, T, self.num_k_heads, self.head_k_dim)
        k = k.reshape(B, T, self.num_k_heads, self.head_k_dim)
        v = v.reshape(B, T, self.num_v_heads, self.head_v_dim)
        # Unit length for q and k, and q times Dk^-0.5. rms_norm adds eps to the mean of squares, l2 to their sum.
        scale = self.head_k_dim**-0.5
        eps = 1e-6 * scale**2
        q = scale**2 * mx.fast.rms_norm(q, None, eps)
        k = scale * mx.fast.rms_norm(k, None, eps)
        g = mx.exp(-mx.exp(self.A_log.astype(mx.float32)) * nn.softplus(a + self.dt_bias))
        return q, k, v, g, mx.sigmoid(b), conv_input, z

    def _conv(self, conv_input: mx.array, T: int) -> mx.array:
        """What conv1d gives, as a sum of shifts: its gradient is four times as fast on the CPU."""
        weight = self.conv1d.weight
        return sum(conv_input[:, i : i + T] * weight[:, i, 0] for i in range(self.conv_kernel_size))

    def _output(self, y: mx.array, z: mx.array, residual: mx.array | None) -> mx.array:
        return added(residual, self.out_proj, self.norm(y, z.reshape(y.shape)).reshape(z.shape))


class FusedGatedDeltaNet(GatedDeltaNet):
    """The layer of `qwen3_next`: one matrix for q, k, v, z and one for b, a; a key head's rows lie together."""

    def _add_projections(self, dims: int) -> None:
        self.in_proj_qkvz = nn.Linear(dims, self.conv_dim + self.value_dim, bias=False)
        self.in_proj_ba = nn.Linear(dims, 2 * self.num_v_heads, bias=False)

    def _inputs(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        B, T, _ = x.shape
        heads = self.num_v_heads // self.num_k_heads
        ends = [self.head_k_dim, 2 * self.head_k_dim, 2 * self.head_k_dim + heads * self.head_v_dim]
        qkvz, ba = products(x, self.in_proj_qkvz, self.in_proj_ba)
        qkvz = mx.split(qkvz.reshape(B, T, self.num_k_heads, -1), ends, axis=-1)
        ba = mx.split(ba.reshape(B, T, self.num_k_heads, -1), 2, axis=-1)
        q, k, v, z, b, a = (part.reshape(B, T, -1) for part in (*qkvz, *ba))
        return mx.concatenate([q, k, v], axis=-1), z, b, a
