"""DFlash 2's dynamic convolutions: what goes into a sublayer, and what comes out, is mixed with the row before."""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from specmlx.drafters.block import Join, Layer
from specmlx.drafters.config import DrafterConfig


class DynamicConv(nn.Module):
    """Grouped causal convolutions around a sublayer, inside each block; both kernels come from the sublayer's input.

    out_i[c] = sum over k of (base[side, k, c] + dynamic_i[side, k, group of c]) * y_{i - k}[c], with y = 0 before the
    block; side 0 is the input's, side 1 the output's.
    """

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.block = config.block_size
        self.taps, self.groups = config.conv_kernel_size, config.hidden_size // config.conv_group_size
        # The identity, as training begins with.
        base = mx.zeros((2, self.taps, config.hidden_size))
        base[:, 0] = 1
        self.base_kernel = base
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * self.taps * self.groups, bias=False)
        self.kernel_projection.weight = mx.zeros_like(self.kernel_projection.weight)

    def __call__(self, u: mx.array, sublayer: Callable[[mx.array], mx.array]) -> mx.array:
        """Rows `[B, R, hidden]` of one block or of many packed ones."""
        B, R, _ = u.shape
        dynamic = self.kernel_projection(u).reshape(B, R, 2, self.taps, self.groups, 1)
        return self._convolve(sublayer(self._convolve(u, dynamic, 0)), dynamic, 1)

    def _convolve(self, y: mx.array, dynamic: mx.array, side: int) -> mx.array:
        B, R, H = y.shape
        blocks = y.reshape(B, R // self.block, self.block, H)
        total = mx.zeros_like(y).reshape(B, R, self.groups, -1)
        for k in range(self.taps):
            moved = mx.pad(blocks[:, :, : self.block - k], [(0, 0), (0, 0), (k, 0), (0, 0)])
            kernel = self.base_kernel[side, k].reshape(self.groups, -1) + dynamic[:, :, side, k]
            total = total + kernel * moved.reshape(B, R, self.groups, -1)
        return total.reshape(B, R, H)


class ConvLayer(Layer):
    """A layer whose attention and MLP each have a convolution around them; context rows pass it by."""

    def __init__(self, config: DrafterConfig):
        super().__init__(config)
        self.attention_conv = DynamicConv(config)
        self.mlp_conv = DynamicConv(config)

    def __call__(self, x: mx.array, positions: mx.array, join: Join, mask: mx.array) -> mx.array:
        def attention(u: mx.array) -> mx.array:
            return self.self_attn(u, positions, join, mask)

        h = x + self.attention_conv(self.input_layernorm(x), attention)
        return h + self.mlp_conv(self.post_attention_layernorm(h), self.mlp)
