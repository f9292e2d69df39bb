"""The Qwen3.5-family hybrid: Gated DeltaNet layers with full attention between them, by mlx-lm's names."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial

import mlx.core as mx
import mlx.nn as nn

from specmlx.cache import checks
from specmlx.cache.kv import visible
from specmlx.cache.layers import Layer, LayerStates, Origin, Pass
from specmlx.cache.quantized import KVFormat
from specmlx.formats.module_weights import fingerprint
from specmlx.kernels.gated_delta import STEP
from specmlx.targets import mlx_lm_cache
from specmlx.targets.attention import Attention
from specmlx.targets.config import LINEAR, HybridConfig
from specmlx.targets.gated_delta import FusedGatedDeltaNet, GatedDeltaNet
from specmlx.targets.mlp import make_mlp
from specmlx.targets.target import Target
from specmlx.targets.weights import sanitize

# Through mlx-lm's interface, passes of up to this many rows are stepped, as decoding is; longer ones are prefill.
_STEPPED = 16


class DecoderLayer(nn.Module):
    def __init__(self, config: HybridConfig, index: int):
        super().__init__()
        self.is_linear = config.layer_types[index] == LINEAR
        if self.is_linear:
            self.linear_attn = (FusedGatedDeltaNet if config.fused_projections else GatedDeltaNet)(config)
        else:
            self.self_attn = Attention(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = make_mlp(config, index)
        # The processes that have the other parts of this layer (see `targets.sharding`).
        self.sharding_group: mx.distributed.Group | None = None

    def __call__(self, x: mx.array, mixer: Callable) -> tuple[mx.array, object]:
        """x plus its mixer's output plus its MLP's; `mixer(normed x, residual=x)` returns the layer's new state too."""
        group = self.sharding_group
        if group is None:
            h, state = mixer(self.input_layernorm(x), residual=x)
            return self.mlp(self.post_attention_layernorm(h), h), state
        part, state = mixer(self.input_layernorm(x), residual=None)
        h = x + mx.distributed.all_sum(part, group=group)
        part = self.mlp(self.post_attention_layernorm(h), None)
        return h + mx.distributed.all_sum(part, group=group), state


class HybridTextModel(nn.Module):
    def __init__(self, config: HybridConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = [DecoderLayer(config, i) for i in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def rows(self, h: mx.array, mixers: Sequence[Callable], tap_ids: Sequence[int]):
        """Embeddings `[B, T, D]` through all layers: the residual stream, the new states, the taps `[B, T, F]`."""
        states, taps = [], {}
        for i, (layer, mixer) in enumerate(zip(self.layers, mixers, strict=True)):
            h, state = layer(h, mixer)
            states.append(state)
            if i in tap_ids:
                taps[i] = h
        features = mx.concatenate([taps[i] for i in tap_ids], axis=-1) if tap_ids else None
        return h, states, features


class TextModel(nn.Module):
    def __init__(self, config: HybridConfig):
        super().__init__()
        self.model = HybridTextModel(config)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)


class Model(Target):
    """A hybrid target (mlx-lm's `qwen3_5`, `qwen3_5_moe` and `qwen3_next`)."""

    def __init__(self, config: HybridConfig):
        super().__init__(config, state_layers=config.num_hidden_layers)
        self.args = config
        self.model_type = config.model_type
        self.language_model = TextModel(config)

    @cached_property
    def fingerprint(self) -> str:
        """A name for the weights, taken when it is first asked for: what their states are known by."""
        # The kind of rope by both of its names, as conversations that were kept before know it.
        rope = self.args.rope_parameters | {"type": self.args.rope_parameters["rope_type"]}
        return fingerprint(self, replace(self.args, draft_model=None, rope_parameters=rope))

    @property
    def model(self) -> HybridTextModel:
        return self.language_model.model

    @property
    def layers(self) -> list[DecoderLayer]:
        return self.model.layers

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype of activations."""
        return self.model.norm.weight.dtype

    @property
    def head(self) -> nn.Module:
        """The layer that logits come from: the head, or the table of embeddings that is tied to it."""
        return self.language_model.lm_head if "lm_head" in self.language_model else self.embedding

    @property
    def embedding(self) -> nn.Module:
        """The table of embeddings."""
        return self.model.embed_tokens

    def embed_tokens(self, ids: mx.array) -> mx.array:
        """Embeddings `[..., D]` of token ids `[...]`."""
        return self.model.embed_tokens(ids)

    def lm_head(self, h: mx.array) -> mx.array:
        """Logits `[..., V]` of hidden rows `[..., D]` that the final norm has seen."""
        if "lm_head" in self.language_model:
            return self.language_model.lm_head(h)
        return self.language_model.model.embed_tokens.as_linear(h)

    def new_states(self, batch: int = 1, kv_format: KVFormat | None = None) -> LayerStates:
        """The states of `batch` conversations before their first row, keys and values in `kv_format` from its start on.

        Raises ValueError for a format that the heads can't have, or that several lanes would reach one by one.
        """
        if kv_format is not None:
            kv_format.check(self.config.head_dim)
            if batch > 1 and kv_format.start:
                raise ValueError(f"quantized_kv_start is {kv_format.start}: with {batch} lanes it must be 0")
        layers = [layer.linear_attn.empty(batch, self.dtype) if layer.is_linear else None for layer in self.layers]
        states = LayerStates(layers, batch, kv_format)
        # An array that is still lazy could only be evaluated in this thread.
        mx.eval([layer[:2] for layer in states.layers if layer is not None])
        return states

    def verify(self, states: LayerStates, rows: mx.array, tap_ids: Sequence[int] = ()) -> Pass:
        """Rows `[B, T]` (int32 ids) after the committed ones: logits `[B, T, V]`, features `[B, T, F]`; none committed.

        Raises RuntimeError, before anything changes, while the last pass is neither committed nor aborted.
        """
        h, layers, features = self._rows(states, self.embed_tokens(rows), tap_ids, stepped=True)
        return states.open(Pass(rows.shape[1], layers, self.lm_head(self.model.norm(h)), features))

    def prefill(
        self, states: LayerStates, tokens: mx.array, tap_ids: Sequence[int] = (), step_size: int = 2048
    ) -> Iterator[tuple[mx.array, mx.array | None]]:
        """See `Target`. `step_size` is rounded up to a multiple of 64. On the CPU rows have the bits of `verify`."""
        return super().prefill(states, tokens, tap_ids, -(-step_size // STEP) * STEP)

    def _prefilled(self, states: LayerStates, step: mx.array, tap_ids: Sequence[int]) -> mx.array | None:
        _, layers, features = self._rows(states, self.embed_tokens(step), tap_ids, stepped=False)
        return states.open(Pass(step.shape[1], layers, features=features)).features

    def _rows(self, states: LayerStates, h: mx.array, tap_ids: Sequence[int], stepped: bool):
        """Rows after the committed ones: with a tape, or without where all of them will be kept."""
        B, T, _ = h.shape
        origin = states.origin(T)
        mask, kv_format = _mask(origin, B, T), states.format_of(T)

        def mixer(layer: DecoderLayer, state: Layer) -> Callable:
            if not layer.is_linear:
                where = dict(start=origin.start, length=origin.length, capacity=states.capacity, mask=mask)
                return partial(layer.self_attn, kv=state, kv_format=kv_format, **where)
            if stepped:
                return partial(layer.linear_attn.verify, state=state, count=origin.count)
            return partial(layer.linear_attn.prefill, state=state.folded(origin.count))

        return self.model.rows(h, [*map(mixer, self.layers, states.layers)], tap_ids)

    def features(self, tokens: mx.array, tap_ids: Sequence[int] = ()):
        """Final hidden rows `[B, T, D]` (normed) and taps `[B, T, F]` of whole sequences `[B, T]`; differentiable."""
        return self._whole(self.embed_tokens(tokens), tap_ids)

    def scored(self, tokens: mx.array, tap_ids: Sequence[int] = ()):
        """Logits `[B, T, V]` and taps `[B, T, F]` of whole sequences `[B, T]`; differentiable."""
        hidden, features = self.features(tokens, tap_ids)
        return self.lm_head(hidden), features

    def _whole(self, h: mx.array, tap_ids: Sequence[int] = ()):
        B, T, _ = h.shape
        mask = "causal" if T > 1 else None

        def mixer(layer: DecoderLayer) -> Callable:
            if layer.is_linear:
                return partial(layer.linear_attn.prefill, state=layer.linear_attn.empty(B, h.dtype))
            return partial(layer.self_attn, kv=None, start=0, length=0, mask=mask)

        h, _, features = self.model.rows(h, [*map(mixer, self.layers)], tap_ids)
        return self.model.norm(h), features

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Weights of any publisher under this model's names; idempotent (see `targets.weights`)."""
        return sanitize(weights, tied="lm_head" not in self.language_model)

    def make_cache(self) -> list:
        """Empty stock mlx-lm caches, one a layer, for mlx-lm's own `generate` and cache files."""
        return mlx_lm_cache.empty_caches([layer.is_linear for layer in self.layers])

    @property
    def kv_heads(self) -> int:
        """How many key and value heads an attention layer has in this process."""
        return next(layer.self_attn.num_key_value_heads for layer in self.layers if not layer.is_linear)

    @property
    def _heads(self) -> tuple[int, int]:
        return self.kv_heads, self.config.head_dim

    def check_states(
        self, tokens: Sequence[int], parts: Iterable[Mapping[int, Layer]], kv_format: KVFormat | None
    ) -> None:
        """Raise ValueError where ids and layers, from a file perhaps, can't be those of conversations of this model's.

        parts: of the rows of each, all layers.
        """
        checks.check_tokens(tokens, self.vocab_size)
        empty = dict(enumerate(self.new_states().layers))
        for layers in parts:
            checks.check_fit(layers, empty, self._heads, kv_format)

    def import_caches(self, caches: list) -> LayerStates:
        """States that hold what stock mlx-lm caches hold."""
        return mlx_lm_cache.import_caches(caches, self.new_states(), self._heads)

    def export_caches(self, states: LayerStates, caches: list) -> None:
        """Write the committed rows into stock mlx-lm caches, in place."""
        mlx_lm_cache.export_caches(states, caches)

    def __call__(
        self, inputs: mx.array, cache: list | None = None, input_embeddings: mx.array | None = None
    ) -> mx.array:
        """Logits `[B, L, V]` as mlx-lm's models give them; `cache`, stock mlx-lm caches, is updated in place."""
        h = self.embed_tokens(inputs) if input_embeddings is None else input_embeddings
        if cache is None:
            return self.lm_head(self._whole(h)[0])
        states = mlx_lm_cache.import_caches(cache, self.new_states(h.shape[0]), self._heads)
        rows = h.shape[1]
        h, layers, _ = self._rows(states, h, (), rows <= _STEPPED)
        states.open(Pass(rows, layers))
        states.commit(rows)
        mlx_lm_cache.export_caches(states, cache)
        return self.lm_head(self.model.norm(h))


def _mask(origin: Origin, B: int, T: int) -> mx.array | str | None:
    if isinstance(origin.start, int):
        return "causal" if T > 1 else None
    positions = mx.broadcast_to(origin.start.reshape(-1, 1), (B, 1)) + mx.arange(T)
    return visible(positions, origin.length)
