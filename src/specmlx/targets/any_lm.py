"""Any other mlx-lm model as a target: its own code and caches, behind the two ways to run rows that the loop needs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from specmlx.cache.layers import Pass
from specmlx.cache.mlx_lm import CacheStates
from specmlx.formats.config import text_of
from specmlx.formats.module_weights import fingerprint
from specmlx.formats.rope import rope_at_top
from specmlx.targets.mlx_lm_cache import length_of
from specmlx.targets.taps import Outline
from specmlx.targets.target import Target

EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embeddings")
_SHAPE = (
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)


@dataclass(frozen=True)
class LMConfig:
    """What pairing needs to know of a target, and what a new drafter for it is shaped by, where its config says so."""

    model_type: str
    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    draft_model: str | None = None
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int | None = None
    rope_theta: float | None = None


class AnyLM(Target):
    """A model object of mlx-lm's as a target. Its modules are not touched; rejected rows are trimmed or replayed.

    Where a cache can't be trimmed (recurrent layers), the rows accepted since the last snapshot run again in front of
    the next pass, up to 16 of them, and in a pass of their own beyond that.
    """

    def __init__(self, model: nn.Module, config: dict[str, Any] | None = None):
        super().__init__(_config(model, config or {}), state_layers=len(make_prompt_cache(model)))
        self.lm = model
        self._outline = Outline(model)

    @cached_property
    def fingerprint(self) -> str:
        """A name for the weights, taken when it is first asked for: what their states are known by."""
        return fingerprint(self.lm, replace(self.config, draft_model=None))

    @property
    def layers(self) -> list:
        return self._outline.layers

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype of activations."""
        return self.embed_tokens(mx.zeros((1, 1), dtype=mx.int32)).dtype

    @property
    def head(self) -> nn.Module:
        """The layer that logits come from, before whatever the model's own code does to them."""
        owners = [module for module in (self.lm, self.lm.get("language_model")) if module and "lm_head" in module]
        return owners[0].lm_head if owners else self.embedding

    @property
    def embedding(self) -> nn.Module:
        """The table of embeddings. Raises ValueError where the model's code has it under no name that is known."""
        for name in EMBEDDINGS:
            if name in self._outline.inner:
                return self._outline.inner[name]
        raise ValueError(f"{self.config.model_type} has no table of embeddings named {' or '.join(EMBEDDINGS)}")

    def embed_tokens(self, ids: mx.array) -> mx.array:
        """Embeddings `[..., D]` of token ids `[...]`, as they are in the table."""
        return self.embedding(ids)

    def scored(self, tokens: mx.array, tap_ids: Sequence[int] = ()):
        """Logits `[B, T, V]` and taps `[B, T, F]` of whole sequences `[B, T]`.

        Raises ValueError where a tapped layer returns no rows `[B, T, D]`.
        """
        return self._outline.rows(tokens, None, tap_ids)

    def new_states(self, batch: int = 1) -> CacheStates:
        """The state of a conversation before its first row. Raises ValueError for more than one lane."""
        if batch != 1:
            raise ValueError(f"{self.config.model_type} runs one conversation at a time, not {batch}")
        return CacheStates(make_prompt_cache(self.lm))

    def verify(self, states: CacheStates, rows: mx.array, tap_ids: Sequence[int] = ()) -> Pass:
        """Rows `[1, T]` (int32 ids) after the committed ones: logits `[1, T, V]`, features `[1, T, F]`; none committed.

        Raises RuntimeError, before anything changes, while the last pass is neither committed nor aborted.
        """
        if states.overdue:
            self._replay(states)
        logits, features = self._run(states, rows, tap_ids)
        first = states.replayed
        found = Pass(rows.shape[1], [], logits[:, first:], None if features is None else features[:, first:])
        states.outputs = [x for x in (found.logits, found.features) if x is not None]
        return found

    def _prefilled(self, states: CacheStates, step: mx.array, tap_ids: Sequence[int]) -> mx.array | None:
        features = self.verify(states, step, tap_ids).features
        # The logits are never evaluated.
        states.outputs = [] if features is None else [features]
        return features

    def _run(self, states: CacheStates, rows: mx.array, tap_ids: Sequence[int]):
        ids = states.begin(rows)
        try:
            return self._outline.rows(ids, states.caches, tap_ids)
        except BaseException:
            states.abort()
            raise

    def _replay(self, states: CacheStates) -> None:
        """Let what has been accepted behind the snapshot run by itself, so that the next one is taken behind it."""
        self._run(states, mx.zeros((1, 0), dtype=mx.int32), ())
        states.commit(0)

    def import_caches(self, caches: list) -> CacheStates:
        """States that go on from mlx-lm's caches of this model."""
        if len(caches) != self.state_layers:
            raise ValueError(f"prompt_cache has {len(caches)} layers but the model has {self.state_layers}")
        return CacheStates(caches, length_of(caches))

    def export_caches(self, states: CacheStates, caches: list) -> None:
        """Write the committed rows into the caches that the states came from, in place."""
        self.catch_up(states)
        states.export(caches)

    def catch_up(self, states: CacheStates) -> None:
        """Let accepted rows that the caches don't hold yet run, so that they may be exported or copied."""
        if not states.whole:
            self._replay(states)


def _config(model: nn.Module, config: dict[str, Any]) -> LMConfig:
    args = vars(model.args) if hasattr(model, "args") else {}
    text = {**text_of(config), **(args.get("text_config") or {}), **args}
    sizes = {}
    for name in ("hidden_size", "vocab_size"):
        if not isinstance(value := text.get(name, config.get(name)), int):
            raise ValueError(f"{type(model).__module__} does not say its {name}: specmlx can't run it")
        sizes[name] = value
    model_type = str(text.get("model_type") or config.get("model_type"))
    shape = {name: text[name] for name in _SHAPE if isinstance(text.get(name), int) and text[name] > 0}
    rope = {**text, **rope_at_top(text)}.get("rope_theta")
    return LMConfig(
        model_type,
        num_hidden_layers=len(model.layers),
        draft_model=config.get("draft_model"),
        rope_theta=float(rope) if isinstance(rope, (int, float)) and rope > 0 else None,
        **sizes,
        **shape,
    )
