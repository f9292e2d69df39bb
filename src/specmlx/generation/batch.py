"""Several prompts at once: mlx_lm's `batch_generate`, over lanes that speculate each at its own pace."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from specmlx.cache.quantized import KVFormat
from specmlx.cache.store import PromptCache
from specmlx.decoding.draft_length import FULL, AutoLength, LaneLengths
from specmlx.decoding.policy import Policy
from specmlx.decoding.processors import Processor
from specmlx.decoding.sampling import plain_sampler
from specmlx.decoding.stats import Stats
from specmlx.decoding.stops import StopStrings
from specmlx.drafters.proposal import Drafter
from specmlx.formats.values import check
from specmlx.generation.chat_turns import Turns, turns
from specmlx.generation.draft_options import choose_drafter, choose_length
from specmlx.generation.prompt_cache import open_cache
from specmlx.generation.prompts import encode_prompt, wrapped_tokenizer
from specmlx.generation.responses import GenerationResponse, Reply
from specmlx.generation.scheduler import Job, Scheduler
from specmlx.generation.threads import clear_streams_at_end
from specmlx.loading.load import AUTO
from specmlx.targets.any_lm import AnyLM
from specmlx.targets.from_mlx_lm import as_target


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

    @property
    def prompt_tps(self) -> float:
        return (self.prompt_tokens - self.cached_tokens) / max(self.prompt_time, 1e-9)

    @property
    def generation_steps(self) -> int:
        return self.passes

    @property
    def decode_time(self) -> float:
        return self.generation_time

    @property
    def wall_time(self) -> float:
        return self.prompt_time + self.generation_time

    @property
    def generation_tps(self) -> float:
        return self.generation_tokens / max(self.generation_time, 1e-9)


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


class Jobs:
    """Makes jobs for one model and drafter, and the scheduler that runs them."""

    def __init__(self, model: Any, tokenizer: Any, draft_model: Any = AUTO, num_draft_tokens: int | str | None = AUTO):
        self.model = as_target(model)
        self.tokenizer = wrapped_tokenizer(tokenizer)
        if self.model.sharding_group is not None:
            raise ValueError("the model is split over several processes: they answer one request at a time")
        num_draft_tokens = check("num_draft_tokens", num_draft_tokens)
        self.drafter: Drafter | None
        self.drafter, self._stats = choose_drafter(self.model, draft_model, num_draft_tokens, Policy())
        unasked = self.drafter is not None and self.drafter is self.model.fallback
        if unasked and isinstance(self.model, AnyLM) and num_draft_tokens in (AUTO, None):
            # Rounds of requests that take turns can't be timed, and nobody asked for this drafter.
            self.drafter = None
            self._stats = Stats(mode="plain", reason=self.model.no_draft_reason)
        self._caching, self._template = False, None
        self.length = None if num_draft_tokens == FULL else num_draft_tokens
        if self.drafter is not None and num_draft_tokens in (AUTO, None):
            self.length = LaneLengths(self._length_of)
            # The weights' fingerprints are taken now, not within a round.
            self.length(1)

    def _length_of(self, lanes: int) -> AutoLength:
        return choose_length(self.model, self.drafter, AUTO, *([] if lanes == 1 else [f"{lanes} lanes"]))

    def scheduler(
        self,
        kv_bits: int | str | None = None,
        kv_group_size: int = 64,
        quantized_kv_start: int = 5000,
        **options: Any,
    ) -> Scheduler:
        """Options as `batch_generate`'s. Raises ValueError for those that can't be honoured."""
        options |= {name: check(name, options[name]) for name in ("max_lanes", "prefill_step_size") if name in options}
        kv_format = KVFormat.read(kv_bits, kv_group_size, quantized_kv_start)
        self._caching = options.get("prompt_cache") is not None
        # Refused before any prompt runs.
        open_cache(self.model, None, kv_format)
        return Scheduler(self.model, self.drafter, self.length, kv_format=kv_format, **options)

    def new(
        self,
        prompt: str | mx.array | Sequence[int],
        max_tokens: int,
        *,
        seed: int | None = None,
        stop: str | Sequence[str] | None = (),
        sampler: Callable[[mx.array], mx.array] | None = None,
        logits_processors: Sequence[Callable[[mx.array, mx.array], mx.array]] | None = None,
        emit: Callable[[GenerationResponse], None],
        done: Callable[[Exception | None], None],
    ) -> Job:
        """A request, checked as `stream_generate` does. Raises ValueError."""
        max_tokens = check("max_tokens", max_tokens)
        ids = encode_prompt(self.tokenizer, prompt, self.model.vocab_size)
        policy = Policy(plain_sampler(sampler), logits_processors, check("seed", seed))
        stats = Stats(self._stats.mode, self._stats.reason or policy.reason)
        stops = StopStrings(stop)
        return Job(
            ids=ids,
            policy=policy,
            reply=Reply(self.tokenizer, stops, len(ids), stats),
            stats=stats,
            emit=emit,
            done=done,
            stop_tokens=frozenset(self.tokenizer.eos_token_ids),
            max_tokens=max_tokens,
            turns=self._turns() if self._caching else None,
        )

    def _turns(self) -> Turns:
        if self._template is None:
            self._template = turns(self.tokenizer)
        return self._template


class _Answer:
    """One prompt's tokens, as they come in."""

    def __init__(self, stop_tokens: frozenset[int], logprobs: bool):
        self.text = ""
        self.tokens: list[int] = []
        self.logprobs: list[float] | None = [] if logprobs else None
        self.error: Exception | None = None
        self._stop_tokens = stop_tokens

    def emit(self, response: GenerationResponse) -> None:
        self.text += response.text
        if response.token not in self._stop_tokens:
            self.tokens.append(response.token)
            if self.logprobs is not None:
                self.logprobs.append(response.logprobs[response.token].item())

    def done(self, error: Exception | None) -> None:
        self.error = error


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
    jobs = Jobs(model, tokenizer, draft_model, num_draft_tokens)
    scheduler = jobs.scheduler(
        kv_bits,
        kv_group_size,
        quantized_kv_start,
        max_kv_size=max_kv_size,
        max_lanes=max_lanes,
        prefill_step_size=prefill_step_size,
        prompt_cache=_store(prompt_cache),
        calibrate=calibrate,
    )
    n = len(prompts)
    each = zip(
        prompts,
        _per_prompt("max_tokens", max_tokens, n, (list, tuple)),
        _per_prompt("sampler", sampler, n, (list, tuple)),
        _per_prompt("seed", seed, n, (list, tuple)),
        _processors(logits_processors, n),
        strict=True,
    )
    answers, queued = [], []
    stop_tokens = frozenset(jobs.tokenizer.eos_token_ids)
    for prompt, most, draw, number, processors in each:
        answer = _Answer(stop_tokens, return_logprobs)
        answers.append(answer)
        queued.append(
            jobs.new(
                prompt,
                most,
                seed=number,
                stop=stop,
                sampler=draw,
                logits_processors=processors,
                emit=answer.emit,
                done=answer.done,
            )
        )
    stats = _run(scheduler, queued, verbose)
    response = BatchResponse(
        [answer.text if answer.error is None else None for answer in answers],
        stats,
        token_ids=[answer.tokens for answer in answers] if return_token_ids else None,
        logprobs=[answer.logprobs for answer in answers] if return_logprobs else None,
        errors=[answer.error for answer in answers],
        request_stats=[job.stats for job in queued],
    )
    if verbose:
        print(
            f"{stats.prompt_tokens} prompt tokens ({stats.prompt_tps:.1f} tok/s), {stats.generation_tokens} generated "
            f"({stats.generation_tps:.1f} tok/s) in {stats.passes} target passes, peak memory "
            f"{stats.peak_memory:.2f} GB",
            file=sys.stderr,
        )
    return response


def _run(scheduler: Scheduler, jobs: Sequence[Job], verbose: bool) -> BatchStats:
    from mlx_lm.generate import wired_limit

    clear_streams_at_end()
    for job in jobs:
        scheduler.add(job)
    clock = time.perf_counter()
    with wired_limit(scheduler.model):
        try:
            while not scheduler.idle:
                scheduler.fill()
                scheduler.step()
                if verbose:
                    over = sum(job.over for job in jobs)
                    print(f"\r{over}/{len(jobs)} prompts done", end="", file=sys.stderr, flush=True)
        finally:
            scheduler.close()
    if verbose:
        print(file=sys.stderr)
    seconds = time.perf_counter() - clock
    prompt_time = sum(job.stats.prefill_seconds for job in jobs)
    return BatchStats(
        prompt_tokens=sum(len(job.ids) for job in jobs),
        cached_tokens=sum(job.reply.cached_tokens for job in jobs),
        generation_tokens=sum(job.stats.generation_tokens for job in jobs),
        passes=scheduler.passes,
        prompt_time=prompt_time,
        generation_time=max(seconds - prompt_time, 0.0),
        peak_memory=mx.get_peak_memory() / 1e9,
    )


def _store(prompt_cache: Any) -> PromptCache | None:
    if prompt_cache is None or isinstance(prompt_cache, PromptCache):
        return prompt_cache
    raise ValueError(
        f"prompt_cache is a {type(prompt_cache).__name__}: a batch takes a PromptCache, which is for many prompts"
    )


def _per_prompt(name: str, value: Any, n: int, several: tuple[type, ...]) -> list[Any]:
    if not isinstance(value, several):
        return [value] * n
    if len(value) != n:
        raise ValueError(f"{name} has {len(value)} entries for {n} prompts: give one for all, or one each")
    return list(value)


def _processors(value: Any, n: int) -> list[Any]:
    if not value:
        return [None] * n
    if all(isinstance(one, (list, tuple)) or one is None for one in value):
        return _per_prompt("logits_processors", value, n, (list, tuple))
    if foreign := next((one for one in value if not isinstance(one, Processor)), None):
        raise ValueError(
            f"logits_processors holds a {type(foreign).__name__}, which may carry state: give a list of lists, "
            "with processors of its own for each prompt"
        )
    return [value] * n
