"""The public API: mlx_lm's `generate` and `stream_generate`, over the speculative loop."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from specmlx.cache.conversation import Conversation
from specmlx.cache.quantized import KVFormat
from specmlx.cache.store import PromptCache
from specmlx.decoding import loop
from specmlx.decoding.draft_length import AutoLength
from specmlx.decoding.policy import Policy
from specmlx.decoding.round import OnProposal
from specmlx.decoding.sampling import plain_sampler
from specmlx.decoding.stops import StopStrings
from specmlx.decoding.timer import DETOKENIZE, Timer
from specmlx.drafters.proposal import Drafter
from specmlx.formats.printable import printable
from specmlx.formats.values import check
from specmlx.generation.chat_turns import turns
from specmlx.generation.context_limits import check_memory, context_limit, tokens_left, warn_if_full
from specmlx.generation.draft_options import choose_drafter, choose_length, measure, warn_if_idle
from specmlx.generation.prompt_cache import (
    close_cache,
    load_prompt_cache,
    make_prompt_cache,
    open_cache,
    save_prompt_cache,
)
from specmlx.generation.prompts import encode_prompt, wrapped_tokenizer
from specmlx.generation.responses import GenerationResponse, Reply, summary
from specmlx.generation.reuse import Reuse
from specmlx.generation.threads import clear_streams_at_end
from specmlx.loading.load import AUTO, load, load_drafter
from specmlx.parallel.broadcast import ASKED, SharedLength, from_first, nobodys_noise, what_is_asked
from specmlx.parallel.group import agreed
from specmlx.targets.from_mlx_lm import as_target

__all__ = [
    "GenerationResponse",
    "PromptCache",
    "generate",
    "load",
    "load_drafter",
    "load_prompt_cache",
    "make_prompt_cache",
    "save_prompt_cache",
    "stream_generate",
]


def stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | mx.array | Sequence[int],
    max_tokens: int = 256,
    draft_model: Drafter | str | None = AUTO,
    stream: Any = None,
    *,
    num_draft_tokens: int | str | None = AUTO,
    seed: int | None = None,
    stop: str | Sequence[str] | None = (),
    sampler: Callable[[mx.array], mx.array] | None = None,
    logits_processors: Sequence[Callable[[mx.array, mx.array], mx.array]] | None = None,
    prompt_cache: Any = None,
    prefill_step_size: int = 2048,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    max_kv_size: int | None = None,
    kv_bits: int | str | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = 5000,
    input_embeddings: mx.array | None = None,
    calibrate: bool = True,
    profile: bool = False,
) -> Iterator[GenerationResponse]:
    """Generate text token by token with mlx_lm's signature and, where the model has a drafter, several tokens a pass.

    Args:
        model: what `specmlx.load` or `mlx_lm.load` returned, or `mlx_lm.models` made; it is not changed.
        prompt: text, ids, or an array of ids; with a `prompt_cache` that holds rows, only what is new.
        max_tokens: -1 for no limit.
        draft_model: "auto" (the one loaded with the model), None for plain decoding, a drafter, or its path.
        num_draft_tokens: drafted tokens verified in each pass, 0 to the drafter's most; "full" is that most, "auto" the
            number that is fastest for this text on this machine (0 where drafting doesn't pay).
        seed: makes sampling repeatable, whatever the drafter and the width.
        stop: strings that end the text; they are not part of it.
        sampler, logits_processors: `specmlx.make_sampler`'s and `make_logits_processors`'s, or callables
            like mlx_lm's.
        prompt_cache: `make_prompt_cache(model)` or mlx_lm's list of caches, extended in place; or a `PromptCache`: then
            the prompt is the whole conversation, of which only what the cache doesn't hold is run.
        prefill_step_size: prompt tokens per step, rounded up to a multiple of 64.
        prompt_progress_callback: gets (processed, total).
        max_kv_size: most tokens of the conversation, prompt and answer; default: what the model was made for
            (max_position_embeddings). A longer prompt is refused, and an answer ends there with finish_reason "length"
            and a warning.
        kv_bits, kv_group_size: keys and values of the attention layers in mlx's format of so many bits (2 to 8) with a
            scale for so many elements; kv_bits "int8": 8 bits with one float32 scale per token and head.
        quantized_kv_start: from this many tokens on; the first ones too, then.
        calibrate: for "auto", measure what rounds take before the first answer of a pair on this machine, which takes
            up to five seconds, and again where it has changed. Without it, a guess is used.
        profile: take decoding's time apart, in the last response's `stats.phases`. Each phase is then waited for, so it
            is slower than usual.

    Raises ValueError for options that can't be honoured, an empty prompt, ids outside the vocabulary, max_tokens of 0.
    """
    if input_embeddings is not None:
        raise ValueError("input_embeddings is not supported yet: leave it out")
    return Generation(
        model,
        tokenizer,
        prompt,
        max_tokens,
        draft_model,
        stream,
        num_draft_tokens=num_draft_tokens,
        seed=seed,
        stop=stop,
        sampler=sampler,
        logits_processors=logits_processors,
        prompt_cache=prompt_cache,
        prefill_step_size=prefill_step_size,
        progress=prompt_progress_callback,
        max_kv_size=max_kv_size,
        kv_format=KVFormat.read(kv_bits, kv_group_size, quantized_kv_start),
        calibrate=calibrate,
        profile=profile,
    ).responses()


def generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | mx.array | Sequence[int],
    verbose: bool = False,
    **kwargs: Any,
) -> str:
    """The whole text of `stream_generate`, with the same options; `verbose` prints it, and figures on stderr."""
    if wrong := [name for name in ("temp", "temperature", "top_p", "top_k", "min_p") if name in kwargs]:
        raise TypeError(f"generate() takes no {wrong[0]}: pass sampler=make_sampler(temp=…, top_p=…, …)")
    text, response = "", None
    for response in stream_generate(model, tokenizer, prompt, **kwargs):
        text += response.text
        if verbose:
            print(printable(response.text, sys.stdout), end="", flush=True)
    if verbose:
        print()
        print(summary(response), file=sys.stderr)
    return text


@dataclass
class Generation:
    """One request alone, by `stream_generate`'s options. on_proposal: see `Batch`."""

    model: Any
    tokenizer: Any
    prompt: str | mx.array | Sequence[int]
    max_tokens: int = 256
    draft_model: Drafter | str | None = AUTO
    stream: Any = None
    num_draft_tokens: int | str | None = AUTO
    seed: int | None = None
    stop: str | Sequence[str] | None = ()
    sampler: Callable[[mx.array], mx.array] | None = None
    logits_processors: Sequence[Callable[[mx.array, mx.array], mx.array]] | None = None
    prompt_cache: Any = None
    prefill_step_size: int = 2048
    progress: Callable[[int, int], None] | None = None
    max_kv_size: int | None = None
    kv_format: KVFormat | None = None
    calibrate: bool = True
    profile: bool = False
    on_proposal: OnProposal | None = None

    def __post_init__(self):
        self.model = model = as_target(self.model)
        context_limit(model, self.max_kv_size)
        self.max_tokens = check("max_tokens", self.max_tokens)
        self.prefill_step_size = check("prefill_step_size", self.prefill_step_size)
        self.num_draft_tokens = check("num_draft_tokens", self.num_draft_tokens)
        self.tokenizer = wrapped_tokenizer(self.tokenizer)
        self.ids = encode_prompt(self.tokenizer, self.prompt, model.vocab_size)
        if model.sharding_group is not None and isinstance(self.prompt_cache, PromptCache):
            raise ValueError(
                "the model is split over several processes: use make_prompt_cache(model), not a PromptCache"
            )
        self.policy = Policy(plain_sampler(self.sampler), self.logits_processors, check("seed", self.seed))
        self.drafter, self.stats = choose_drafter(model, self.draft_model, self.num_draft_tokens, self.policy)
        self.stops = StopStrings(self.stop)
        apart = [] if self.on_proposal is None else [self.on_proposal.name]
        self.length = choose_length(model, self.drafter, self.num_draft_tokens, *apart)
        self.stop_tokens = frozenset(self.tokenizer.eos_token_ids)
        # A CPU has nothing to overlap with its host, and a round that is dropped at the end has cost a whole one.
        self.lookahead = mx.default_device() != mx.cpu and not self.profile

    def responses(self) -> Iterator[GenerationResponse]:
        """Answer: a response for each token."""
        from mlx_lm.generate import wired_limit

        clear_streams_at_end()
        model, group = self.model, self.model.sharding_group
        with contextlib.ExitStack() as stack:
            stack.enter_context(wired_limit(model))
            with agreed(group, *ASKED) as asked:
                conversation, reuse, full = self._open(stack)
                if group is not None:
                    limits = (self.max_tokens, self.prefill_step_size, self.kv_format, self.lookahead)
                    stop = (sorted(self.stop_tokens), list(self.stops.stops))
                    ids = [*conversation.tokens, *self.ids]
                    asked |= what_is_asked(ids, self.policy, self.drafter, self.length, stop, limits)
            if group is not None and self.seed is None:
                self.policy = self.policy.with_noise(nobodys_noise(group))
            timer, length = Timer(self.stats) if self.profile else None, self.length
            cached = 0 if reuse is None else reuse.length
            if isinstance(length, AutoLength):
                if self.calibrate:
                    with contextlib.nullcontext() if self.stream is None else mx.stream(self.stream):
                        measure(model, self.drafter, length, self.ids, 1, self.lookahead, self.on_proposal)
                length.context = len(conversation.tokens) + len(self.ids) - cached
                length = length if group is None else SharedLength(length, group)
            batch = loop.Batch(
                model,
                self.drafter,
                length,
                lookahead=self.lookahead,
                timer=timer,
                decide=None if group is None else partial(from_first, group),
                on_proposal=self.on_proposal,
            )
            sequence = loop.Sequence(
                conversation, self.policy, self.ids[:cached], self.stop_tokens, self.max_tokens, self.stats
            )
            options = dict(progress=self.progress)
            if reuse is not None:
                options["checkpoints"] = reuse.checkpoints
                options["progress"] = self.progress and reuse.counted(self.progress)
            tokens = loop.generate_tokens(batch, sequence, self.ids[cached:], self.prefill_step_size, **options)
            if self.stream is not None:
                tokens = _on_stream(tokens, self.stream)
            reply = Reply(self.tokenizer, self.stops, len(self.ids), self.stats, cached)
            try:
                for token in tokens:
                    if timer:
                        timer.start()
                    response = reply.feed(token)
                    if timer:
                        timer.lap(DETOKENIZE)
                    if response.finish_reason:
                        if timer:
                            timer.finish()
                            response.stats = self.stats.snapshot()
                        # What nobody asked for may find nothing.
                        if self.drafter is not model.fallback:
                            warn_if_idle(self.stats, self.drafter, self.length)
                        if self.drafter is not None:
                            model.count_first(self.drafter, self.stats.proposed, self.stats.first_accepted)
                        if full:
                            warn_if_full(full, response)
                    yield response
                    if response.finish_reason:
                        break
            finally:
                tokens.close()
                # What a profiled round takes, others don't.
                if isinstance(self.length, AutoLength) and not self.profile:
                    self.length.keep()
                if conversation.owned_by(sequence.owner):
                    conversation.settle()
                close_cache(model, self.prompt_cache, conversation, sequence.owner)
                if reuse is not None:
                    reuse.answered(reply.answer)

    def _open(self, stack: contextlib.ExitStack) -> tuple[Conversation, Reuse | None, tuple[int, str] | None]:
        """The conversation, what a `PromptCache` has of it, and its limit where `max_tokens` comes from that."""
        model, ids, prompt_cache, reuse = self.model, self.ids, self.prompt_cache, None
        if isinstance(prompt_cache, PromptCache):
            tokens_left(context_limit(model, self.max_kv_size), len(ids))
            check_memory(model, len(ids), self.kv_format)
            reuse = Reuse(stack, prompt_cache, model, turns(self.tokenizer), self.drafter, ids, self.kv_format)
            prompt_cache = reuse.conversation
        conversation = open_cache(model, prompt_cache, self.kv_format)
        limit = context_limit(model, self.max_kv_size, conversation.max_kv_size)
        total = len(conversation.tokens) + len(ids) - (0 if reuse is None else reuse.length)
        left = tokens_left(limit, total)
        check_memory(model, total - len(conversation.processed), self.kv_format)
        if left is None or 0 <= self.max_tokens <= left:
            return conversation, reuse, None
        self.max_tokens = left
        return conversation, reuse, limit


def _on_stream(tokens: Iterator[loop.Token], stream: Any) -> Iterator[loop.Token]:
    with contextlib.closing(tokens):
        while True:
            # Entered for each token, so that the caller's own work between two tokens stays on its stream.
            with mx.stream(stream):
                token = next(tokens, None)
            if token is None:
                return
            yield token
