"""The gated full-attention layer of Qwen3.5, with mlx-lm's names and arithmetic."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from specmlx.cache.kv import KV, reserve, write
from specmlx.cache.quantized import KVFormat
from specmlx.formats.rope import attention_factor, is_plain, periods, rotary_dims, slowdown
from specmlx.kernels.attention import Span, Stored, attention
from specmlx.kernels.linear import added, products
from specmlx.targets.config import HybridConfig


class Rope(nn.Module):
    """Turns rows by periods of their own, with mlx-lm's bits."""

    def __init__(self, rope: dict[str, Any], dims: int):
        super().__init__()
        self.dims = dims
        self.factor = attention_factor(rope)
        self._periods = periods(rope, dims)
        # They are no parameters: left lazy, only this thread could evaluate them.
        mx.eval(self._periods)

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """x `[B, H, T, D]`, turned to positions from `offset` (int, or int32 `[B]`) on."""
        if self.factor != 1.0:
            x = x.at[..., : self.dims].multiply(self.factor)
        return mx.fast.rope(x, self.dims, traditional=False, base=None, scale=1.0, offset=offset, freqs=self._periods)


class Attention(nn.Module):
    operator = "attention"

    def __init__(self, config: HybridConfig):
        super().__init__()
        self.num_attention_heads = config.num_attention_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.scale = self.head_dim**-0.5

        D, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(D, self.num_attention_heads * self.head_dim * 2, bias=bias)
        self.k_proj = nn.Linear(D, self.num_key_value_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(D, self.num_key_value_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.num_attention_heads * self.head_dim, D, bias=bias)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)

        rope, dims = config.rope_parameters, rotary_dims(config.rope_parameters, self.head_dim)
        plain = is_plain(rope)
        self.rope = nn.RoPE(dims, base=rope["rope_theta"], scale=1 / slowdown(rope)) if plain else Rope(rope, dims)
        self.consistent = False

    def on_kernel(self, dtype: mx.Dtype) -> bool:
        """See `Served`: over keys that are not quantized."""
        q, k = ((1, heads, 1, self.head_dim) for heads in (self.num_attention_heads, self.num_key_value_heads))
        keys = Stored(mx.zeros(k, dtype))
        return attention.on_kernel(mx.zeros(q, dtype), keys, keys)

    def __call__(
        self,
        x: mx.array,
        kv: KV | None,
        start: int | mx.array,
        length: int,
        mask: mx.array | str | None,
        residual: mx.array | None,
        first: int = 0,
        kv_format: KVFormat | None = None,
        capacity: int = 0,
    ) -> tuple[mx.array, KV | None]:
        """Rows `[B, T, D]`, written at `start` (int, or int32 `[B]`), see the buffer's first `length` rows by `mask`,
        which lets each see itself and the older ones, down to `first`. `residual` is added to the output.

        With `kv_format` the buffer is kept in it, and brought into it first where it isn't. A buffer that is too small
        grows to `capacity` rows where that is more.
        Without a buffer (`kv` None and `length` 0, in training) the rows see one another only.
        """
        q, k, v = products(x, self.q_proj, self.k_proj, self.v_proj)
        q, gate = self._queries(q, start)
        k, v = self._keys_values(k, v, start)
        if kv_format is not None:
            kv = kv_format.written(kv, k, v, start, length, capacity)
            keys, values = kv_format.stored(kv)
            if attention.on_kernel(q, keys, values):
                o = attention(q, keys, values, Span(start, length, first), self.scale, mask)
            else:
                o = kv_format.attend(q, kv, length, self.scale, mask)
            return self.output(o, gate, residual), kv
        if length:
            rows = KV(k, v)
            kv = write(reserve(kv, length, rows, capacity=capacity), rows, start)
            keys, values = Stored(kv.keys), Stored(kv.values)
            o = attention(q, keys, values, Span(start, length, first), self.scale, mask)
            return self.output(o, gate, residual), kv
        return self.attend(q, gate, k, v, mask, residual), kv

    def queries(self, x: mx.array, start: int | mx.array) -> tuple[mx.array, mx.array]:
        """Queries `[B, H, T, head_dim]` (normed, roped from `start` on) and output gates `[B, T, H * head_dim]`."""
        return self._queries(self.q_proj(x), start)

    def keys_values(self, x: mx.array, start: int | mx.array) -> tuple[mx.array, mx.array]:
        """Keys (normed, roped from `start` on) and values `[B, Hkv, T, head_dim]`."""
        return self._keys_values(*products(x, self.k_proj, self.v_proj), start)

    def _queries(self, q: mx.array, start: int | mx.array) -> tuple[mx.array, mx.array]:
        B, T, _ = q.shape
        q, gate = mx.split(q.reshape(B, T, self.num_attention_heads, -1), 2, axis=-1)
        return self.rope(self.q_norm(q).transpose(0, 2, 1, 3), offset=start), gate.reshape(B, T, -1)

    def _keys_values(self, k: mx.array, v: mx.array, start: int | mx.array) -> tuple[mx.array, mx.array]:
        B, T, _ = k.shape
        k = self.k_norm(k.reshape(B, T, self.num_key_value_heads, -1)).transpose(0, 2, 1, 3)
        v = v.reshape(B, T, self.num_key_value_heads, -1).transpose(0, 2, 1, 3)
        return self.rope(k, offset=start), v

    def attend(
        self,
        q: mx.array,
        gate: mx.array,
        k: mx.array,
        v: mx.array,
        mask: mx.array | str | None,
        residual: mx.array | None,
    ) -> mx.array:
        """Output `[B, T, D]`, gated, projected and added to the residual."""
        return self.output(mx.fast.scaled_dot_product_attention(q, k, v, scale=self.scale, mask=mask), gate, residual)

    def output(self, o: mx.array, gate: mx.array, residual: mx.array | None) -> mx.array:
        """Heads' outputs `[B, H, T, head_dim]`, gated, projected and added to the residual: `[B, T, D]`."""
        o = o.transpose(0, 2, 1, 3).reshape(gate.shape)
        return added(residual, self.o_proj, o * mx.sigmoid(gate))
