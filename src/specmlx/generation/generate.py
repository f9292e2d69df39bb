"""The public API: mlx_lm's `generate` and `stream_generate`, over the speculative loop."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from specmlx.cache.quantized import KVFormat
from specmlx.drafters.proposal import Drafter
from specmlx.formats.printable import printable
from specmlx.generation.responses import GenerationResponse, summary
from specmlx.generation.scheduler import Scheduler
from specmlx.loading.load import AUTO


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
    kv_format = KVFormat.read(kv_bits, kv_group_size, quantized_kv_start)
    pair = model, tokenizer, draft_model, num_draft_tokens
    scheduler = Scheduler(*pair, None, prefill_step_size, prompt_cache, max_kv_size, kv_format, calibrate, profile)
    options = seed, stop, sampler, logits_processors, prompt_progress_callback
    request = scheduler.request(prompt, max_tokens, *options)
    responses = scheduler.answer(request)
    return responses if stream is None else _on_stream(responses, stream)


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


def _on_stream(responses: Iterator[GenerationResponse], stream: Any) -> Iterator[GenerationResponse]:
    with contextlib.closing(responses):
        while True:
            # Entered for each token, so that the caller's own work between two tokens stays on its stream.
            with mx.stream(stream):
                response = next(responses, None)
            if response is None:
                return
            yield response
