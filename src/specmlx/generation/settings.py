"""What requests are answered with: the model, its drafter, and every option, checked before anything runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from specmlx.cache.layers import LayerStates
from specmlx.cache.quantized import KVFormat
from specmlx.cache.store import PromptCache
from specmlx.decoding.draft_length import FULL, AutoLength, LaneLengths
from specmlx.decoding.policy import Policy
from specmlx.decoding.round import OnProposal
from specmlx.decoding.sampling import plain_sampler
from specmlx.decoding.stats import Stats
from specmlx.drafters.proposal import Drafter
from specmlx.formats.values import check
from specmlx.generation.chat_turns import Turns, turns
from specmlx.generation.context_limits import context_limit
from specmlx.generation.draft_options import auto_length, choose_drafter
from specmlx.generation.prompt_cache import open_cache
from specmlx.generation.prompts import encode_prompt, wrapped_tokenizer
from specmlx.generation.request import Request, StopStrings
from specmlx.loading.load import AUTO
from specmlx.targets.any_lm import AnyLM
from specmlx.targets.from_mlx_lm import as_target


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
        self.model = model = as_target(self.model)
        self.tokenizer = wrapped_tokenizer(self.tokenizer)
        self.prefill_step_size = check("prefill_step_size", self.prefill_step_size)
        number = check("num_draft_tokens", self.num_draft_tokens)
        self.limit = context_limit(model, self.max_kv_size)
        self.alone, self.caching = self.max_lanes is None, isinstance(self.prompt_cache, PromptCache)
        self.max_lanes = 1 if self.alone else check("max_lanes", self.max_lanes)
        if model.sharding_group is not None and self.caching:
            raise ValueError(
                "the model is split over several processes: use make_prompt_cache(model), not a PromptCache"
            )
        self.drafter, self._reason = choose_drafter(model, self.draft_model, number)
        if not self.alone:
            if model.sharding_group is not None:
                raise ValueError("the model is split over several processes: they answer one request at a time")
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

    def request(
        self,
        prompt: str | mx.array | Sequence[int],
        max_tokens: int = 256,
        *,
        seed: int | None = None,
        stop: str | Sequence[str] | None = (),
        sampler: Callable[[mx.array], mx.array] | None = None,
        logits_processors: Sequence[Callable[[mx.array, mx.array], mx.array]] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Request:
        """A request, by `stream_generate`'s options. Raises ValueError for those that can't be honoured."""
        max_tokens = check("max_tokens", max_tokens)
        ids = encode_prompt(self.tokenizer, prompt, self.model.vocab_size)
        policy = Policy(plain_sampler(sampler), logits_processors, check("seed", seed))
        if self.drafter is None:
            stats = Stats("plain", self._reason)
        else:
            stats = Stats("speculative", policy.reason or self._reason)
        if self.caching and self.turns is None:
            # In the thread of whoever asks, and under no lock: a template may take for ever.
            self.turns = turns(self.tokenizer)
        return Request(ids, policy, max_tokens, stats, StopStrings(stop), self.tokenizer, progress)
