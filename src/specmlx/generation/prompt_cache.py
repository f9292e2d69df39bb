"""`prompt_cache=`: a conversation, a stock mlx-lm cache list that stands for one meanwhile, or a `PromptCache`."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm

from specmlx.cache import checks
from specmlx.cache.conversation import Conversation, Draft
from specmlx.cache.files import load_conversation, save_conversation
from specmlx.cache.mlx_lm import CacheStates
from specmlx.cache.quantized import KVFormat
from specmlx.cache.snapshots import Snapshot, restore, take
from specmlx.cache.store import CHECKPOINT, TURN, PromptCache
from specmlx.decoding.prefill import Checkpoints
from specmlx.decoding.round import observe
from specmlx.drafters.proposal import Drafter
from specmlx.formats.header import entries, header_text, regular_size
from specmlx.formats.sealed import format_of
from specmlx.generation.chat_turns import Turns, keeps, stable
from specmlx.generation.context_limits import context_limit
from specmlx.targets.any_lm import AnyLM
from specmlx.targets.hybrid import Model

# Fewer rows are not worth a snapshot; buffers begin with room for as many of the answer.
_FEW = 64


@dataclass
class InUse:
    """Stands in a stock cache list for a layer while a generator holds the list's conversation."""

    model: Model | AnyLM
    conversation: Conversation
    cache: Any


def make_prompt_cache(model: Any, max_kv_size: int | None = None) -> Any:
    """The state of one conversation, to be given as `prompt_cache=` turn by turn; for mlx-lm's own models, its list.

    max_kv_size: the most tokens that it may hold. Raises ValueError for one that the model was not made for.
    """
    if not isinstance(model, (Model, AnyLM)):
        return mlx_lm.make_prompt_cache(model, max_kv_size)
    context_limit(model, max_kv_size)
    conversation = Conversation(model.new_states())
    conversation.max_kv_size = max_kv_size
    conversation.model = model.fingerprint
    return conversation


def save_prompt_cache(file_name: str, cache: Any, metadata: dict[str, str] | None = None) -> None:
    """Write a conversation, or a stock mlx-lm cache list, to a `.safetensors` file.

    A generator that still holds the list can't go on afterwards.
    """
    if isinstance(cache, list) and cache and isinstance(cache[0], InUse):
        held = cache[0]
        close_cache(held.model, cache, held.conversation, held.conversation.claim())
    if isinstance(cache, Conversation):
        if isinstance(cache.states, CacheStates):
            raise ValueError("only a hybrid's conversation can be saved: use mlx_lm's list of caches as prompt_cache")
        save_conversation(file_name, cache, metadata)
        return
    mlx_lm.save_prompt_cache(file_name, cache, metadata or {})


def load_prompt_cache(file_name: str, return_metadata: bool = False) -> Any:
    """Read what `save_prompt_cache` wrote, ours or mlx-lm's; with its metadata if asked.

    Raises ValueError in one line for a file that is missing, no prompt cache, damaged, or of an older specmlx.
    """
    if not Path(file_name).exists():
        raise ValueError(f"no such prompt cache: {file_name}")
    regular_size(Path(file_name))
    if (format_of(Path(file_name)) or "").startswith("specmlx-"):
        cache, metadata = load_conversation(file_name)
        return (cache, metadata) if return_metadata else cache
    try:
        entries(*header_text(Path(file_name)))
        caches, metadata = mlx_lm.load_prompt_cache(str(file_name), return_metadata=True)
        # Without metadata mlx-lm gives an empty text.
        metadata = checks.texts(metadata or {})
        for layer, cache in enumerate(caches):
            _check_stock(layer, cache)
    # A file's parts may be of any type.
    except Exception as error:
        raise ValueError(f"{file_name} is no prompt cache: {' '.join(str(error).split())[:160]}") from None
    return (caches, metadata) if return_metadata else caches


def _check_stock(layer: int, cache: Any) -> None:
    """Raise ValueError for a cache of mlx-lm's, read from a file, that its class can't have made."""
    kind, what = type(cache), f"layer {layer}, a {type(cache).__name__},"
    if kind is mlx_lm.CacheList:
        for part in cache.caches:
            _check_stock(layer, part)
    elif kind is mlx_lm.ArraysCache:
        if any(x is not None and not isinstance(x, mx.array) for x in cache.cache):
            raise ValueError(f"{what} holds something else than arrays")
    elif kind in (mlx_lm.KVCache, mlx_lm.QuantizedKVCache, mlx_lm.RotatingKVCache, mlx_lm.ChunkedKVCache):
        if cache.keys is None and cache.values is None:
            return
        quantized = kind is mlx_lm.QuantizedKVCache
        arrays = [*cache.keys, *cache.values] if quantized else [cache.keys, cache.values]
        if any(not isinstance(x, mx.array) or x.ndim != 4 or x.shape[:3] != arrays[0].shape[:3] for x in arrays):
            raise ValueError(f"{what} holds no keys and values of the same rows")
        numbers = ("_idx", "max_size", "keep", "group_size", "bits", "chunk_size", "start_position")
        for name in ("offset", *(name for name in numbers if vars(cache).get(name) is not None)):
            checks.natural(vars(cache), name)
        in_place = kind in (mlx_lm.KVCache, mlx_lm.QuantizedKVCache)
        if (cache.offset if in_place else vars(cache).get("_idx", 0)) > arrays[0].shape[2]:
            raise ValueError(f"{what} has {arrays[0].shape[2]} rows, fewer than it says")
    else:
        raise ValueError(f"{what} is of a kind that is not read from files")


def can_trim_prompt_cache(cache: Any) -> bool:
    """Whether tokens can be taken off the end: of mlx-lm's lists that no generator holds, if mlx-lm says so."""
    held = isinstance(cache, list) and cache and isinstance(cache[0], InUse)
    return isinstance(cache, list) and not held and mlx_lm.can_trim_prompt_cache(cache)


def trim_prompt_cache(cache: Any, num_tokens: int) -> int:
    """Take tokens off the end of the cache, where it can be trimmed; how many were, as in mlx-lm."""
    return mlx_lm.trim_prompt_cache(cache, num_tokens) if can_trim_prompt_cache(cache) else 0


def open_cache(model: Model | AnyLM, prompt_cache: Any, kv_format: KVFormat | None = None) -> Conversation:
    """The conversation that `prompt_cache` (None, ours, a stock list) stands for; TypeError for anything else.

    Raises ValueError where it can't be kept in `kv_format`.
    """
    if kv_format is not None and (isinstance(model, AnyLM) or isinstance(prompt_cache, list)):
        what = "this model's conversations" if isinstance(model, AnyLM) else "a list of mlx-lm's caches"
        raise ValueError(f"kv_bits can't be had for {what}: only a hybrid's make_prompt_cache or PromptCache")
    if prompt_cache is None:
        return Conversation(model.new_states() if kv_format is None else model.new_states(1, kv_format))
    if isinstance(prompt_cache, Conversation):
        states = prompt_cache.states
        if isinstance(states, CacheStates) != isinstance(model, AnyLM) or len(states.layers) != model.state_layers:
            raise ValueError(f"prompt_cache has {len(states.layers)} layers but the model has {model.state_layers}")
        if prompt_cache.model not in (None, model.fingerprint):
            raise ValueError(
                f"prompt_cache is a conversation of another model ({prompt_cache.model[:8]}, this one is "
                f"{model.fingerprint[:8]}): start a new one with make_prompt_cache(model)"
            )
        if kv_format is not None:
            kv_format.check(model.config.head_dim)
            states.keep_in(kv_format)
        # One that nobody has gone on with may come from a file.
        if isinstance(model, Model) and prompt_cache.owned_by(0):
            layers = [dict(enumerate(states.layers))] if states.length else []
            model.check_states(prompt_cache.tokens, layers, states.kv_format)
        return prompt_cache
    if not isinstance(prompt_cache, list):
        raise TypeError(f"prompt_cache is a {type(prompt_cache).__name__}: pass make_prompt_cache(model)")
    if prompt_cache and isinstance(prompt_cache[0], InUse):
        return prompt_cache[0].conversation
    states = model.import_caches(prompt_cache)
    # mlx-lm's caches do not say which ids they hold; nothing here needs the ids, only how many they are.
    conversation = Conversation(states, [-1] * states.length)
    prompt_cache[:] = [InUse(model, conversation, cache) for cache in prompt_cache]
    return conversation


def close_cache(model: Model | AnyLM, prompt_cache: Any, conversation: Conversation, owner: int) -> None:
    """Hand a stock list its layers back; as mlx-lm's own they hold every token given, so the pending one runs."""
    if not isinstance(prompt_cache, list) or not conversation.owned_by(owner) or conversation.states.broken:
        return
    if conversation.pending is not None:
        rows = mx.array([[conversation.pending]], dtype=mx.int32)
        model.verify(conversation.states, rows)
        conversation.states.evaluate()
        conversation.states.commit(1)
    prompt_cache[:] = [held.cache for held in prompt_cache]
    model.export_caches(conversation.states, prompt_cache)


class Reuse:
    """The conversation that a request goes on with; its first `length` rows come from the cache."""

    def __init__(
        self,
        stack: ExitStack,
        cache: PromptCache,
        model: Model | AnyLM,
        turns: Turns,
        drafter: Drafter | None,
        ids: Sequence[int],
        kv_format: KVFormat | None = None,
    ):
        """For a prompt of `ids`; what it begins with is pinned until the `stack` is closed.

        turns: what the chat template does to them. Snapshots serve the same model and format of keys and values.
        """
        empty = open_cache(model, None, kv_format).states
        self.cache, self.model, self.ids, self._turns = cache, model, ids, turns
        self.namespace = model.fingerprint + (f" {kv_format.name}" if kv_format else "")
        self.snapshot = self._begun_with = snapshot = stack.enter_context(cache.find(self.namespace, ids))
        self._drafter = drafter if hasattr(drafter, "fingerprint") else None
        self.conversation = Conversation(empty)
        if snapshot is not None:
            if snapshot.from_file:
                snapshot = self._checked(snapshot, empty)
            self.conversation = restore(snapshot, empty, len(ids) + _FEW)
            packed = self._drafter and snapshot.drafts.get(self._drafter.fingerprint)
            if packed and hasattr(context := self._drafter.new_context(), "unpack"):
                context.unpack(packed)
                self.conversation.draft = Draft(self._drafter, context, len(self.conversation.processed))
        self.length = len(self.conversation.processed)

    def _checked(self, snapshot: Snapshot, empty: Any) -> Snapshot:
        """A file's snapshot, without a drafter's context that can't be one's. Raises ValueError for another model's."""
        model, rows = self.model, snapshot.length
        if not isinstance(model, Model):
            raise ValueError("the prompt cache's file holds a hybrid's prompts, which this model can't go on from")
        try:
            parts = (piece.kvs | snapshot.recurrent for piece in snapshot.piece.chain())
            model.check_states(snapshot.ids, parts, empty.kv_format)
        except ValueError as error:
            raise ValueError(f"the prompt cache's file does not fit its model: {error}; delete the file") from None
        known = {}
        if self._drafter is not None and (name := self._drafter.fingerprint) in snapshot.drafts:
            packed, context = snapshot.drafts[name], self._drafter.new_context()
            features = mx.zeros((1, 2, model.config.hidden_size * len(self._drafter.tap_ids)), model.dtype)
            self._drafter.observe(context, mx.zeros((1, 2), dtype=mx.int32), features, 2)
            if hasattr(context, "unpack") and checks.packed_fits(packed, context.pack(), rows, model.vocab_size):
                known[name] = packed
        return replace(snapshot, drafts=known)

    def answered(self, answer: str) -> None:
        """The request is over: keep the state after the answer where the next prompt will hold it."""
        conversation, keep = self.conversation, self.cache.keep_answers
        if keep is None:
            keep = keeps(answer, self.ids, self._turns)
        if keep and not conversation.states.broken and len(conversation.processed) >= len(self.ids):
            if self._drafter is not None:
                observe(conversation, self._drafter)
            if isinstance(self.model, AnyLM):
                self.model.catch_up(conversation.states)
            self._put(conversation, TURN)
        begun, ended = self._begun_with, self.snapshot
        if begun is not None and ended is not None and ended.length > begun.length:
            self.cache.demote(self.namespace, begun)

    @property
    def checkpoints(self) -> Checkpoints:
        """Where the prefill of the rest leaves snapshots, with what takes them.

        Row counts up to one token before the prompt's end, none soon behind the rows that are in or another one.
        """
        most, every = len(self.ids) - 1, self.cache.checkpoint_every
        turns = [min(place, most) for place in stable(self.ids, self._turns)]
        # Too near to the end to save much: the turn's own snapshot is there.
        places = dict.fromkeys(range(every, max(turns) - every // 2, every), CHECKPOINT)
        places |= dict.fromkeys([*turns, self.cache.common(self.namespace, self.ids)], TURN)
        kept, last = {}, self.length
        for at in sorted(places):
            if at >= last + _FEW:
                kept[at], last = partial(self._put, kind=places[at]), at
        return kept

    def _put(self, conversation: Conversation, kind: int) -> None:
        name, packed, draft = None, None, conversation.draft
        if self._drafter is not None and draft is not None and draft.end == conversation.states.length:
            if hasattr(draft.context, "unpack"):
                name, packed = self._drafter.fingerprint, draft.context.pack()
        before = None if self.snapshot is None else self.snapshot.piece
        self.snapshot = self.cache.put(self.namespace, take(conversation, before, name, packed), kind)
