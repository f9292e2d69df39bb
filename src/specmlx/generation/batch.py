"""Several prompts at once: mlx_lm's `batch_generate`, over lanes that speculate each at its own pace."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from specmlx.cache.quantized import KVFormat
from specmlx.cache.store import PromptCache
from specmlx.decoding.processors import Processor
from specmlx.decoding.stats import Stats
from specmlx.generation.responses import Request
from specmlx.generation.scheduler import Scheduler
from specmlx.loading.load import AUTO


@dataclass
class BatchStats:
    """What a batch did: counts, and seconds of prefill (`prompt_time`) and decoding (`generation_time`).

    passes: verify passes over the target, each for all lanes that were running; `generation_steps` is mlx_lm's name for
    them. `wall_time` is prefill's and decoding's; of the latter, `decode_time` is all. Otherwise mlx_lm's names.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    passes: int = 0
    prompt_time: float = 0.0
    generation_time: float = 0.0
    peak_memory: float = 0.0

    prompt_tps = property(lambda self: (self.prompt_tokens - self.cached_tokens) / max(self.prompt_time, 1e-9))
    generation_tps = property(lambda self: self.generation_tokens / max(self.generation_time, 1e-9))
    generation_steps = property(lambda self: self.passes)
    decode_time = property(lambda self: self.generation_time)
    wall_time = property(lambda self: self.prompt_time + self.generation_time)


@dataclass
class BatchResponse:
    """The answers in the order of the prompts; mlx_lm's fields, and what only specmlx has.

    texts: the generated texts; None where a prompt failed (see `errors`). stats: of the whole batch.
    token_ids, logprobs: as mlx_lm's, on request (end-of-text tokens are not among them).
    errors: what ended each prompt that failed, else None. request_stats: each prompt's rounds, drafts and so on.
    """

    texts: list[str | None]
    stats: BatchStats
    caches: list[Any] | None = None
    token_ids: list[list[int]] | None = None
    logprobs: list[list[float]] | None = None
    errors: list[Exception | None] = field(default_factory=list)
    request_stats: list[Stats] = field(default_factory=list)


def batch_generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str | Sequence[int]],
    prompt_cache: PromptCache | None = None,
    max_tokens: int | Sequence[int] = 128,
    verbose: bool = False,
    return_token_ids: bool = False,
    return_logprobs: bool = False,
    *,
    draft_model: Any = AUTO,
    num_draft_tokens: int | str | None = AUTO,
    sampler: Any = None,
    logits_processors: Any = None,
    seed: int | Sequence[int | None] | None = None,
    stop: str | Sequence[str] | None = (),
    max_lanes: int = 32,
    prefill_step_size: int = 2048,
    max_kv_size: int | None = None,
    kv_bits: int | str | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = 5000,
    calibrate: bool = True,
) -> BatchResponse:
    """Answer several prompts together, as mlx_lm's `batch_generate` does; each text is what it would be alone.

    Args:
        prompts: texts, or lists of ids.
        prompt_cache: a `PromptCache`: prompts are whole conversations, of which only what it doesn't hold is run.
        max_tokens, sampler, seed: one for all prompts, or a list with one each.
        logits_processors: a list for all prompts (objects of specmlx's only), or a list of such lists, one each.
        max_lanes: prompts that decode together; the others wait.
        max_kv_size, kv_bits, kv_group_size, quantized_kv_start, calibrate: as in `stream_generate`, for each prompt.

    A prompt that fails while it runs fails alone: its text is None and `errors` holds the exception. Raises ValueError
    for options and prompts that can't be honoured, before any prompt runs.
    """
    if isinstance(prompts, str):
        raise ValueError("prompts is one text: give a list of them, or use generate")
    kv_format = KVFormat.read(kv_bits, kv_group_size, quantized_kv_start)
    pair = model, tokenizer, draft_model, num_draft_tokens
    scheduler = Scheduler(*pair, max_lanes, prefill_step_size, prompt_cache, max_kv_size, kv_format, calibrate)
    n = len(prompts)
    each = zip(
        prompts,
        _per_prompt("max_tokens", max_tokens, n),
        _per_prompt("seed", seed, n),
        [stop] * n,
        _per_prompt("sampler", sampler, n),
        _processors(logits_processors, n),
        strict=True,
    )
    requests = [scheduler.request(*options) for options in each]
    given: dict[Request, list[tuple[int, float | None]]] = {request: [] for request in requests}
    clock = time.perf_counter()
    for request, response in scheduler.run(requests):
        if response.token not in request.stop_tokens:
            logprob = response.logprobs[response.token].item() if return_logprobs else None
            given[request].append((response.token, logprob))
        if verbose and response.finish_reason:
            over = sum(request.over for request in requests)
            print(f"\r{over}/{n} prompts done", end="", file=sys.stderr, flush=True)
    if verbose:
        print(f"\r{n}/{n} prompts done", file=sys.stderr)
    seconds = time.perf_counter() - clock
    prompt_time = sum(request.stats.prefill_seconds for request in requests)
    stats = BatchStats(
        prompt_tokens=sum(len(request.ids) for request in requests),
        cached_tokens=sum(request.cached_tokens for request in requests),
        generation_tokens=sum(request.stats.generation_tokens for request in requests),
        passes=scheduler.passes,
        prompt_time=prompt_time,
        generation_time=max(seconds - prompt_time, 0.0),
        peak_memory=mx.get_peak_memory() / 1e9,
    )
    response = BatchResponse(
        [request.text if request.error is None else None for request in requests],
        stats,
        token_ids=[[token for token, _ in tokens] for tokens in given.values()] if return_token_ids else None,
        logprobs=[[logprob for _, logprob in tokens] for tokens in given.values()] if return_logprobs else None,
        errors=[request.error for request in requests],
        request_stats=[request.stats for request in requests],
    )
    if verbose:
        print(
            f"{stats.prompt_tokens} prompt tokens ({stats.prompt_tps:.1f} tok/s), {stats.generation_tokens} generated "
            f"({stats.generation_tps:.1f} tok/s) in {stats.passes} target passes, peak memory "
            f"{stats.peak_memory:.2f} GB",
            file=sys.stderr,
        )
    return response


def _per_prompt(name: str, value: Any, n: int) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        return [value] * n
    if len(value) != n:
        raise ValueError(f"{name} has {len(value)} entries for {n} prompts: give one for all, or one each")
    return list(value)


def _processors(value: Any, n: int) -> list[Any]:
    if not value:
        return [None] * n
    if all(isinstance(one, (list, tuple)) or one is None for one in value):
        return _per_prompt("logits_processors", value, n)
    if foreign := next((one for one in value if not isinstance(one, Processor)), None):
        raise ValueError(
            f"logits_processors holds a {type(foreign).__name__}, which may carry state: give a list of lists, "
            "with processors of its own for each prompt"
        )
    return [value] * n
