"""The public API: mlx_lm's `generate` and `stream_generate`, over the speculative loop."""

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from specmlx.boundaries import turns
from specmlx.distributed import agreed
from specmlx.drafters.block_drafter import BlockDrafter
from specmlx.drafters.mtp import MTP
from specmlx.drafters.proposal import Drafter, Fingerprinted
from specmlx.formats.printable import printable
from specmlx.limits import check_memory, context_limit, tokens_left, warn_if_full
from specmlx.loading import AUTO, load, load_drafter
from specmlx.prompt_cache import (
    close_cache,
    load_prompt_cache,
    make_prompt_cache,
    open_cache,
    save_prompt_cache,
)
from specmlx.prompts import encode_prompt
from specmlx.responses import GenerationResponse, Reply, summary
from specmlx.reuse import reusing
from specmlx.speculation.costs import costs_file
from specmlx.speculation.drafting import hand_over
from specmlx.speculation.loop import Token, generate_tokens
from specmlx.speculation.policy import Policy
from specmlx.speculation.profile import DETOKENIZE, Phases, ProfiledDrafter, ProfiledPolicy, ProfiledTarget
from specmlx.speculation.shared import ASKED, SharedWidths, shared, what_is_asked
from specmlx.speculation.stats import Stats
from specmlx.speculation.stops import StopStrings
from specmlx.speculation.width import FULL, AutoWidth
from specmlx.state.quantized_kv import KVFormat
from specmlx.state.store import PromptCache
from specmlx.targets.adopt import as_target
from specmlx.targets.any_lm import AnyLM
from specmlx.targets.hybrid import Model
from specmlx.threads import clear_streams_at_end
from specmlx.values import check, integer

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
    profile: bool = False,
) -> Iterator[GenerationResponse]:
    """Generate text token by token with mlx_lm's signature and, where the model has a drafter, several tokens a pass.

    Args:
        model: what `specmlx.load` or `mlx_lm.load` returned, or `mlx_lm.models` made; it is not changed.
        prompt: text, ids, or an array of ids; with a `prompt_cache` that holds rows, only what is new.
        max_tokens: -1 for no limit.
        draft_model: "auto" (the one loaded with the model), None for plain decoding, a drafter, or its path.
        num_draft_tokens: drafted tokens verified in each pass, 0 to the drafter's most; "full" is that most, "auto" the
            number that is fastest here, measured while decoding (0 where drafting doesn't pay).
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
        profile: take decoding's time apart, in the last response's `stats.phases`. Each phase is then waited for, so it
            is slower than usual.

    Raises ValueError for options that can't be honoured, an empty prompt, ids outside the vocabulary, max_tokens of 0.
    """
    model = as_target(model)
    if input_embeddings is not None:
        raise ValueError("input_embeddings is not supported yet: leave it out")
    kv_format = KVFormat.read(kv_bits, kv_group_size, quantized_kv_start)
    context_limit(model, max_kv_size)
    max_tokens, prefill_step_size = check("max_tokens", max_tokens), check("prefill_step_size", prefill_step_size)
    num_draft_tokens = check("num_draft_tokens", num_draft_tokens)
    tokenizer = wrapped_tokenizer(tokenizer)
    ids = encode_prompt(tokenizer, prompt, model.vocab_size)
    if model.sharding_group is not None and isinstance(prompt_cache, PromptCache):
        raise ValueError("the model is split over several processes: use make_prompt_cache(model), not a PromptCache")
    policy = Policy(plain_sampler(sampler), logits_processors, check("seed", seed))
    drafter, stats = choose_drafter(model, draft_model, num_draft_tokens, policy)
    stops = StopStrings(stop)
    return _responses(
        model,
        tokenizer,
        ids,
        policy,
        drafter,
        stats,
        stops,
        prompt_cache,
        stream,
        kv_format,
        max_kv_size,
        profile,
        dict(
            width=choose_width(model, drafter, num_draft_tokens),
            stop_tokens=frozenset(tokenizer.eos_token_ids),
            max_tokens=max_tokens,
            prefill_step_size=prefill_step_size,
            progress=prompt_progress_callback,
        ),
    )


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


def _responses(
    model, tokenizer, ids, policy, drafter, stats, stops, prompt_cache, stream, kv_format, max_kv_size, profile, options
):
    from mlx_lm.generate import wired_limit

    clear_streams_at_end()
    group = model.sharding_group
    with contextlib.ExitStack() as stack:
        stack.enter_context(wired_limit(model))
        reuse = None
        with agreed(group, *ASKED) as asked:
            if isinstance(prompt_cache, PromptCache):
                tokens_left(context_limit(model, max_kv_size), len(ids))
                check_memory(model, len(ids), kv_format)
                reuse = stack.enter_context(reusing(prompt_cache, model, turns(tokenizer), drafter, ids, kv_format))
                prompt_cache = reuse.conversation
                options |= reuse.options(options["progress"])
            conversation = open_cache(model, prompt_cache, kv_format)
            cached = 0 if reuse is None else reuse.length
            limit = context_limit(model, max_kv_size, conversation.max_kv_size)
            total = len(conversation.tokens) + len(ids) - cached
            left = tokens_left(limit, total)
            check_memory(model, total - len(conversation.processed), kv_format)
            full = left is not None and (options["max_tokens"] < 0 or options["max_tokens"] > left)
            if full:
                options["max_tokens"] = left
            # A CPU has nothing to overlap with its host, and a round that is dropped at the end has cost a whole one.
            options["lookahead"] = mx.default_device() != mx.cpu and not profile
            if group is not None:
                asked |= what_is_asked([*conversation.tokens, *ids], policy, drafter, stops.stops, kv_format, options)
        owner = conversation.claim()
        phases, target, by = Phases(stats) if profile else None, model, drafter
        if group is not None:
            by, policy = shared(group, conversation, drafter, policy)
        if phases is not None:
            target, policy = ProfiledTarget(model, phases), ProfiledPolicy(policy, phases)
            if by is not None:
                profiled = ProfiledDrafter(by, phases)
                hand_over(conversation, by, profiled)
                by = profiled
        tokens = generate_tokens(target, conversation, ids[cached:], policy, by, stats=stats, owner=owner, **options)
        if stream is not None:
            tokens = _on_stream(tokens, stream)
        reply = Reply(tokenizer, stops, len(ids), stats, cached)
        widths = options["width"]
        try:
            for token in tokens:
                with phases.phase(DETOKENIZE) if phases else contextlib.nullcontext():
                    response = reply.feed(token)
                if response.finish_reason:
                    if phases:
                        phases.finish()
                        response.stats = stats.snapshot()
                    # What nobody asked for may find nothing.
                    if drafter is not model.fallback:
                        _warn_if_idle(stats, drafter, widths)
                    if drafter is not None:
                        model.count_first(drafter, stats.proposed, stats.first_accepted)
                    if full:
                        warn_if_full(limit, response)
                yield response
                if response.finish_reason:
                    break
        finally:
            tokens.close()
            # What a profiled round takes, others don't.
            if isinstance(widths, AutoWidth) and not profile:
                widths.keep()
            if conversation.owned_by(owner):
                conversation.settle()
                if isinstance(by, ProfiledDrafter):
                    hand_over(conversation, by, by.drafter)
            close_cache(model, prompt_cache, conversation, owner)
            if reuse is not None:
                reuse.answered(reply.answer)


def _on_stream(tokens: Iterator[Token], stream: Any) -> Iterator[Token]:
    with contextlib.closing(tokens):
        while True:
            # Entered for each token, so that the caller's own work between two tokens stays on its stream.
            with mx.stream(stream):
                token = next(tokens, None)
            if token is None:
                return
            yield token


def choose_drafter(model: Model | AnyLM, draft_model: Any, num_draft_tokens: int | str | None, policy: Policy):
    """The drafter to use, or none, and the stats that say so."""
    reason = policy.reason
    if isinstance(draft_model, str) and draft_model == AUTO:
        drafter = model.draft_model
        if drafter is None:
            reason = model.no_draft_reason
    elif draft_model is None:
        drafter, reason = None, "draft_model is None"
    else:
        drafter = load_drafter(draft_model, model) if isinstance(draft_model, str) else draft_model
    if drafter is not None and not isinstance(drafter, Drafter):
        raise ValueError(f"draft_model is a {type(drafter).__name__}: load a drafter with specmlx.load_drafter")
    check_width(drafter, num_draft_tokens, reason)
    if drafter is None:
        return None, Stats(mode="plain", reason=reason)
    if isinstance(drafter, BlockDrafter | MTP) and drafter.target.embedding is not model.embedding:
        raise ValueError("draft_model is paired with another target: load it with specmlx.load_drafter(path, model)")
    if num_draft_tokens == 0:
        return None, Stats(mode="plain", reason="num_draft_tokens is 0")
    if drafter is model.fallback:
        reason = policy.reason or f"prompt lookup drafts: {model.no_draft_reason}"
    return drafter, Stats(mode="speculative", reason=reason or model.kernel_note)


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


def choose_width(
    model: Any, drafter: Drafter | None, num_draft_tokens: int | str | None, lanes: int = 1
) -> int | AutoWidth | None:
    """What `generate_tokens` takes for a `num_draft_tokens`; None is the drafter's most. What rounds of several `lanes`
    take is kept apart."""
    if drafter is None or num_draft_tokens == FULL:
        return None
    if num_draft_tokens != AUTO and num_draft_tokens is not None:
        return num_draft_tokens
    known = isinstance(drafter, Fingerprinted)
    # Rounds take as long as the kernels that were chosen for them have it.
    apart = ([] if lanes == 1 else [f"{lanes} lanes"]) + ([model.kernel_note] if model.kernel_note else [])
    file = costs_file(model.fingerprint, drafter.fingerprint, *apart) if known else None
    if model.sharding_group is not None:
        return SharedWidths(drafter.max_width, model.sharding_group, file)
    return AutoWidth(drafter.max_width, file=file)


def _warn_if_idle(stats: Stats, drafter: Drafter | None, widths: int | AutoWidth | None) -> None:
    asked = widths.current if isinstance(widths, AutoWidth) else widths != 0
    if drafter is not None and asked and stats.rounds > 1 and stats.proposed == 0:
        warnings.warn("the drafter was loaded but never proposed a token", stacklevel=4)


def plain_sampler(sampler: Any) -> Any:
    """The sampler, None where it is mlx_lm's greedy one."""
    from mlx_lm.sample_utils import greedy_sampler

    return None if sampler is greedy_sampler else sampler


def wrapped_tokenizer(tokenizer: Any) -> Any:
    """The tokenizer in mlx_lm's wrapper, which knows its end-of-text tokens and how to detokenize as text grows."""
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    return tokenizer if isinstance(tokenizer, TokenizerWrapper) else TokenizerWrapper(tokenizer)
