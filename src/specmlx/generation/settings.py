"""What requests are answered with: the model, its drafter, and every option, checked before anything runs."""

import contextlib
import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from specmlx.cache.conversation import Conversation
from specmlx.cache.layers import LayerStates
from specmlx.cache.quantized import KVFormat
from specmlx.cache.store import PromptCache
from specmlx.decoding import loop
from specmlx.decoding.draft_length import FULL, AutoLength, LaneLengths, Measurement
from specmlx.decoding.policy import Policy
from specmlx.decoding.prefill import prefill
from specmlx.decoding.round import OnProposal
from specmlx.decoding.stats import Stats, Timer
from specmlx.drafters.block_drafter import BlockDrafter
from specmlx.drafters.mtp import MTP
from specmlx.drafters.proposal import Drafter
from specmlx.formats.cache import cache_directory
from specmlx.formats.values import check, integer
from specmlx.generation.chat_turns import Turns, turns
from specmlx.generation.context_limits import context_limit
from specmlx.generation.prompt_cache import open_cache
from specmlx.generation.prompts import encode_prompt
from specmlx.generation.responses import Request, StopStrings
from specmlx.kernels.choice.table import power_mode, this_chip, this_version
from specmlx.kernels.dispatch import metal_factory, to_stderr
from specmlx.loading.load import AUTO, load_drafter
from specmlx.parallel.broadcast import SharedLength, from_first
from specmlx.targets.any_lm import AnyLM
from specmlx.targets.config import FULL as ATTENTION
from specmlx.targets.from_mlx_lm import as_target
from specmlx.targets.hybrid import Model

# How many of a prompt's last tokens conversations begin with in which rounds are measured.
_PROMPT = 128


@dataclass(eq=False)
class Settings:
    """What requests are answered with, by `stream_generate`'s options. Raises ValueError for what can't be honoured.

    max_lanes: requests that decode together. None: there is a single one, whose `prompt_cache` may be a conversation or
    mlx-lm's list of caches, and whose model may be split over several processes.
    profile, on_proposal: of a single request (see `Timer`, `Batch`).
    """

    model: Any
    tokenizer: Any
    draft_model: Drafter | str | None = AUTO
    num_draft_tokens: int | str | None = AUTO
    max_lanes: int | None = None
    prefill_step_size: int = 2048
    prompt_cache: Any = None
    max_kv_size: int | None = None
    kv_format: KVFormat | None = None
    calibrate: bool = True
    profile: bool = False
    on_proposal: OnProposal | None = None

    def __post_init__(self):
        from mlx_lm.tokenizer_utils import TokenizerWrapper

        self.model = model = as_target(self.model)
        if not isinstance(self.tokenizer, TokenizerWrapper):
            self.tokenizer = TokenizerWrapper(self.tokenizer)
        self.prefill_step_size = check("prefill_step_size", self.prefill_step_size)
        number = check("num_draft_tokens", self.num_draft_tokens)
        self.limit = context_limit(model, self.max_kv_size)
        self.alone, self.caching = self.max_lanes is None, isinstance(self.prompt_cache, PromptCache)
        self.max_lanes = 1 if self.alone else check("max_lanes", self.max_lanes)
        if model.sharding_group is not None and (self.caching or not self.alone):
            instead = (
                "use make_prompt_cache(model), not a PromptCache" if self.alone else "they answer one request at a time"
            )
            raise ValueError(f"the model is split over several processes: {instead}")
        self.drafter, self._reason = choose_drafter(model, self.draft_model, number)
        if not self.alone:
            if not (self.caching or self.prompt_cache is None):
                kind = type(self.prompt_cache).__name__
                raise ValueError(f"prompt_cache is a {kind}: a batch takes a PromptCache, which is for many prompts")
            # Refused before any prompt runs.
            open_cache(model, None, self.kv_format)
            if self.drafter is model.fallback and isinstance(model, AnyLM) and number in (AUTO, None):
                # Rounds of requests that take turns can't be timed, and nobody asked for this drafter.
                self.drafter, self._reason = None, model.no_draft_reason
        self.auto = self.drafter is not None and number in (AUTO, None)
        self.length: int | AutoLength | LaneLengths | None
        if self.auto:
            self.length = self._length_of(1) if self.alone else LaneLengths(self._length_of)
            # The weights' fingerprints are taken now, not within a round.
            self.length(1)
        else:
            self.length = None if self.drafter is None or number == FULL else number
        # A CPU has nothing to overlap with its host, and a round that is dropped at the end has cost a whole one.
        self.lookahead = mx.default_device() != mx.cpu and not self.profile
        self.turns: Turns | None = None
        self.together = self.alone or isinstance(model.new_states(), LayerStates)

    def _length_of(self, lanes: int) -> AutoLength:
        apart = [self.on_proposal.name] if self.on_proposal else [] if lanes == 1 else [f"{lanes} lanes"]
        return auto_length(self.model, self.drafter, *apart)

    def batch(self, length: Any, timer: Timer | None = None) -> loop.Batch:
        """An empty batch; `length`: its number of drafted tokens (see `Batch`)."""
        group, hooks = self.model.sharding_group, {"timer": timer, "on_proposal": self.on_proposal}
        decide = None if group is None else partial(from_first, group)
        return loop.Batch(self.model, self.drafter, length, lookahead=self.lookahead, decide=decide, **hooks)

    def measure(self, length: AutoLength, prompt: Sequence[int], lanes: int = 1) -> None:
        """Measure what rounds take, if that is due: those of conversations that begin as the prompt ends, thrown away.

        It is off where $SPECMLX_CALIBRATE is 0. What goes wrong here goes wrong in the answer, which says so.
        """
        group, allowed = self.model.sharding_group, os.environ.get("SPECMLX_CALIBRATE") != "0"
        due = self.calibrate and allowed and length.curve.due
        if group is not None:
            due = from_first(group, mx.array(due, dtype=mx.int32)).item()
        if not due:
            return
        if group is None or group.rank() == 0:
            name, together = type(self.drafter).__name__, f", {lanes} requests together" if lanes > 1 else ""
            to_stderr(f"measuring what rounds take with {name} on this machine{together} (5 s at most)")
        chosen = Measurement(length) if group is None else SharedLength(Measurement(length), group)
        batch = self.batch(chosen)
        with contextlib.suppress(Exception):
            prompt = list(prompt[-max(_PROMPT // lanes, 8) :])
            for _ in range(lanes):
                conversation = Conversation(self.model.new_states())
                for _ in prefill(self.model, conversation, prompt, self.drafter, _PROMPT):
                    pass
                batch.join([loop.Sequence(conversation, Policy(), list(prompt))])
            while not chosen.done:
                for _ in batch.round():
                    pass
        length.context = 0

    def request(
        self,
        prompt: str | mx.array | Sequence[int],
        max_tokens: int = 256,
        seed: int | None = None,
        stop: str | Sequence[str] | None = (),
        sampler: Callable[[mx.array], mx.array] | None = None,
        logits_processors: Sequence[Callable[[mx.array, mx.array], mx.array]] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Request:
        """A request, by `stream_generate`'s options. Raises ValueError for those that can't be honoured."""
        from mlx_lm.sample_utils import greedy_sampler

        max_tokens = check("max_tokens", max_tokens)
        ids = encode_prompt(self.tokenizer, prompt, self.model.vocab_size)
        sampler = None if sampler is greedy_sampler else sampler
        policy = Policy(sampler, logits_processors, check("seed", seed))
        mode, reason = ("speculative", policy.reason) if self.drafter else ("plain", None)
        stats = Stats(mode, reason or self._reason)
        if self.caching and self.turns is None:
            # In the thread of whoever asks, and under no lock: a template may take for ever.
            self.turns = turns(self.tokenizer)
        return Request(ids, policy, max_tokens, stats, StopStrings(stop), self.tokenizer, progress)


def choose_drafter(
    model: Model | AnyLM, draft_model: Any, num_draft_tokens: int | str | None
) -> tuple[Drafter | None, str | None]:
    """The drafter to use, or None, and what there is to say of that."""
    drafter, reason = draft_model, "draft_model is None"
    if isinstance(draft_model, str) and draft_model == AUTO:
        drafter, reason = model.draft_model, model.no_draft_reason
    elif isinstance(draft_model, str):
        drafter = load_drafter(draft_model, model)
    if drafter is not None and not isinstance(drafter, Drafter):
        kind = type(drafter).__name__
        raise ValueError(f"draft_model is {drafter!r:.40}, of the kind {kind}: load it with specmlx.load_drafter")
    check_width(drafter, num_draft_tokens, reason)
    if isinstance(drafter, BlockDrafter | MTP) and drafter.target.embedding is not model.embedding:
        raise ValueError("draft_model is paired with another target: load it with specmlx.load_drafter(path, model)")
    if drafter is None:
        return None, reason
    if num_draft_tokens == 0:
        return None, "num_draft_tokens is 0"
    return drafter, f"prompt lookup drafts: {model.no_draft_reason}" if drafter is model.fallback else model.kernel_note


def check_width(drafter: Drafter | None, num_draft_tokens: int | str | None, reason: str | None = None) -> None:
    """Raises ValueError where a drafter (or none, for `reason`) proposes fewer tokens than are wanted."""
    if num_draft_tokens is None or isinstance(num_draft_tokens, str):
        return
    if drafter is not None:
        most = drafter.max_width
        allowed = f"an integer from 0 to {most}, which is all that this drafter proposes, {AUTO!r} or {FULL!r}"
        integer("num_draft_tokens", num_draft_tokens, 0, most, allowed)
    elif num_draft_tokens:
        raise ValueError(f"num_draft_tokens is {num_draft_tokens} but there is no drafter: {reason}")


def auto_length(model: Any, drafter: Drafter, *apart: str) -> AutoLength:
    """What chooses the number of drafted tokens for each round; what rounds take is kept `apart`."""
    # A drafter of the user's is known by its name: if it has changed, rounds contradict what was kept.
    known = hasattr(drafter, "fingerprint")
    name = drafter.fingerprint if known else f"{type(drafter).__module__}.{type(drafter).__qualname__}"
    # Rounds take as long as the kernels that were chosen for them have it.
    pair = model.fingerprint, name, drafter.max_width, model.kernel_note, metal_factory() is not None, *apart
    machine = platform.node(), this_chip(), str(mx.default_device()), power_mode(), this_version()
    digest = blake2b(json.dumps([*pair, *machine]).encode(), digest_size=16)
    file = cache_directory() / "draft_length" / f"{digest.hexdigest()}.json"
    group = model.sharding_group
    return AutoLength(
        drafter.max_width, file=file if group is None or group.rank() == 0 else None, row_share=_row_share(model)
    )


def _row_share(model: Model | AnyLM) -> float:
    """Bytes of a row of keys and values, as a share of the weights; 0 where it isn't known."""
    if isinstance(model, AnyLM):
        return 0.0
    row = 2 * model.config.layer_types.count(ATTENTION) * model.kv_heads * model.config.head_dim * model.dtype.size
    return row / sum(x.nbytes for _, x in tree_flatten(model.parameters()))
