"""One request's dealings with a `PromptCache`: what it begins with, and where it leaves snapshots."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx

from specmlx.cache import checks
from specmlx.cache.conversation import Conversation, Draft
from specmlx.cache.quantized import KVFormat
from specmlx.cache.snapshots import Snapshot, restore, take
from specmlx.cache.store import CHECKPOINT, TURN, PromptCache
from specmlx.decoding.drafting import observe
from specmlx.decoding.prefill import Checkpoints
from specmlx.drafters.proposal import Drafter, Fingerprinted, Packable
from specmlx.generation.chat_turns import Turns, keeps, stable
from specmlx.targets.any_lm import AnyLM
from specmlx.targets.hybrid import Model

# Fewer rows are not worth a snapshot; buffers begin with room for as many of the answer.
_FEW = 64


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

        turns: what the chat template does to them.
        Snapshots serve the same model with keys and values kept in the same format.
        """
        if kv_format is not None and isinstance(model, AnyLM):
            raise ValueError("kv_bits can't be had for this model's conversations: only for a hybrid's")
        self.cache = cache
        self.model = model
        self.namespace = model.fingerprint + (f" {kv_format.name}" if kv_format else "")
        self.ids = ids
        self.snapshot = self._begun_with = snapshot = stack.enter_context(cache.find(self.namespace, ids))
        self._drafter = drafter if isinstance(drafter, Fingerprinted) else None
        empty = model.new_states() if kv_format is None else model.new_states(1, kv_format)
        if snapshot is not None and snapshot.from_file:
            snapshot = self._checked(snapshot, empty)
        self.conversation = Conversation(empty) if snapshot is None else restore(snapshot, empty, len(ids) + _FEW)
        self.length = len(self.conversation.processed)
        if snapshot is not None and self._drafter is not None:
            context, packed = self._drafter.new_context(), snapshot.drafts.get(self._drafter.fingerprint)
            if packed is not None and isinstance(context, Packable):
                context.unpack(packed)
                self.conversation.draft = Draft(self._drafter, context, self.length)
        self._turns = turns

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
            if isinstance(context, Packable) and checks.packed_fits(packed, context.pack(), rows, model.vocab_size):
                known[name] = packed
        return replace(snapshot, drafts=known)

    def counted(self, progress: Callable[[int, int], None]) -> Callable[[int, int], None]:
        """A callback for the rest of the prompt by which `progress` counts the whole."""
        return lambda done, _: progress(self.length + done, len(self.ids))

    def answered(self, answer: str) -> None:
        """The request is over: keep the state after the answer where the next prompt will hold it."""
        conversation = self.conversation
        keep = self.cache.keep_answers
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
        most = len(self.ids) - 1
        every = self.cache.checkpoint_every
        turns = [min(place, most) for place in stable(self.ids, self._turns)]
        # Too near to the end to save much: the turn's own snapshot is there.
        places = dict.fromkeys(range(every, max(turns) - every // 2, every), CHECKPOINT)
        junction = self.cache.common(self.namespace, self.ids)
        places |= dict.fromkeys([*turns, junction], TURN)
        kept, last = {}, self.length
        for at in sorted(places):
            if at >= last + _FEW:
                kept[at], last = partial(self._put, kind=places[at]), at
        return kept

    def _put(self, conversation: Conversation, kind: int) -> None:
        name, packed = None, None
        draft = conversation.draft
        if self._drafter is not None and draft is not None and draft.end == conversation.states.length:
            if isinstance(draft.context, Packable):
                name, packed = self._drafter.fingerprint, draft.context.pack()
        before = None if self.snapshot is None else self.snapshot.piece
        self.snapshot = self.cache.put(self.namespace, take(conversation, before, name, packed), kind)
