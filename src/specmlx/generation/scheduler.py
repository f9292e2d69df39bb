"""Which request runs next: prompts are taken in one step at a time, between the rounds of those that decode."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from specmlx.cache.conversation import Conversation
from specmlx.cache.layers import LayerStates
from specmlx.cache.quantized import KVFormat
from specmlx.cache.store import PromptCache
from specmlx.decoding.draft_length import LaneLengths
from specmlx.decoding.loop import Batch, Sequence, Token
from specmlx.decoding.policy import Policy
from specmlx.decoding.prefill import prefill
from specmlx.decoding.stats import Stats
from specmlx.drafters.proposal import Drafter
from specmlx.generation.chat_turns import Turns
from specmlx.generation.context_limits import check_memory, context_limit, tokens_left, warn_if_full
from specmlx.generation.draft_options import measure
from specmlx.generation.prompt_cache import open_cache
from specmlx.generation.responses import GenerationResponse, Reply
from specmlx.generation.reuse import Reuse

ALONE = "this model's state can't hold several lanes: requests take turns"
# Rounds of requests that take turns can't be timed.
ALONE_FULL = f"{ALONE}, with as many drafted tokens as there can be"


@dataclass(eq=False)
class Job:
    """A request on its way. `emit` gets its responses, `done` what ended it: None or an exception; once, at the end.

    Setting `cancelled` ends it at the next step, without a word more. `limit`: how long the conversation may get and
    what says so, where that is what `max_tokens` comes from. `turns`: where there is a prompt cache.
    """

    ids: list[int]
    policy: Policy
    reply: Reply
    stats: Stats
    emit: Callable[[GenerationResponse], None]
    done: Callable[[Exception | None], None]
    stop_tokens: frozenset[int]
    max_tokens: int
    turns: Turns | None = None
    cancelled: bool = False
    over: bool = False
    limit: tuple[int, str] | None = None
    conversation: Conversation | None = None
    reuse: Reuse | None = None
    steps: Iterator | None = None
    sequence: Sequence | None = None
    batch: Batch | None = None
    resources: ExitStack = field(default_factory=ExitStack)

    def deliver(self, token: Token) -> bool:
        """Turn a token into a response; True if the request is over with it."""
        response = self.reply.feed(token)
        self.emit(response)
        if self.limit:
            warn_if_full(self.limit, response)
        return response.finish_reason is not None or self.cancelled


class Scheduler:
    """Up to `max_lanes` requests decode together; the others wait in order. Not thread-safe: one thread drives it."""

    def __init__(
        self,
        model: Any,
        drafter: Drafter | None,
        length: int | LaneLengths | None,
        *,
        max_lanes: int = 8,
        prefill_step_size: int = 2048,
        prompt_cache: PromptCache | None = None,
        max_kv_size: int | None = None,
        kv_format: KVFormat | None = None,
        calibrate: bool = True,
    ):
        self.model, self.drafter = model, drafter
        self.length = length
        self.max_lanes = max_lanes
        self.prefill_step_size = prefill_step_size
        self.prompt_cache = prompt_cache
        self.limit = context_limit(model, max_kv_size)
        self.kv_format, self.calibrate = kv_format, calibrate
        # See `generation.Generation`.
        self.lookahead = mx.default_device() != mx.cpu
        self.together = isinstance(model.new_states(), LayerStates)
        self._waiting: deque[Job] = deque()
        self._prefilling: Job | None = None
        self._running: list[Job] = []
        # One for each stage of the keys' format; where requests take turns, one for each of them.
        self._batches: dict[Any, Batch] = {}
        self._passes = 0

    @property
    def passes(self) -> int:
        """Verify passes over the target, each for all sequences that were running."""
        return self._passes + sum(batch.rounds for batch in self._batches.values())

    @property
    def waiting(self) -> int:
        """Requests that have not begun to run."""
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        return not (self._waiting or self._prefilling or self._running)

    def add(self, job: Job) -> None:
        self._waiting.append(job)

    def fill(self) -> None:
        """Take in prompts until no more can decode together."""
        while self._prefilling or self._may_begin:
            self._sweep()
            self._admit()
            if self._prefilling:
                self._take_in(self._prefilling)

    def step(self) -> None:
        """One step of a prompt that is being taken in, if there is one, and one round of all that decode."""
        self._sweep()
        self._admit()
        if self._prefilling:
            self._take_in(self._prefilling)
        if self._running:
            self._decode()

    def close(self) -> None:
        """Drop every request without a word more."""
        self._close(None)

    def fail(self, error: Exception) -> None:
        """End every request with an error."""
        self._close(error)

    def _close(self, error: Exception | None) -> None:
        jobs = [*self._waiting, *([self._prefilling] if self._prefilling else []), *self._running]
        self._waiting.clear()
        self._prefilling, self._running = None, []
        for key in [*self._batches]:
            self._drop(key)
        for job in jobs:
            job.cancelled = True
            self._end(job, error)

    def _drop(self, key: Any) -> None:
        self._passes += self._batches.pop(key).rounds
        if isinstance(self.length, LaneLengths):
            self.length.keep()

    def _sweep(self) -> None:
        for job in [job for job in self._waiting if job.cancelled]:
            self._waiting.remove(job)
            self._end(job)
        if self._prefilling and self._prefilling.cancelled:
            job, self._prefilling = self._prefilling, None
            self._end(job)
        cancelled = [job for job in self._running if job.cancelled]
        for job in cancelled:
            job.sequence.over = True
        self._retire(cancelled)

    def _admit(self) -> None:
        if self._may_begin:
            self._prefilling = job = self._waiting.popleft()
            try:
                self._begin(job)
            except Exception as error:
                self._prefilling = None
                self._end(job, error)

    @property
    def _may_begin(self) -> bool:
        """Whether the request that has waited longest may begin: there are a lane and, beside others, memory for it."""
        if self._prefilling or not self._waiting or len(self._running) >= self.max_lanes:
            return False
        # Lanes' keys are in one buffer, which is as long for each as the longest needs it.
        rows = [len(self._waiting[0].ids), *(len(job.conversation.processed) for job in self._running)]
        try:
            check_memory(self.model, len(rows) * max(rows), self.kv_format)
        except ValueError:
            return not self._running
        return True

    def _begin(self, job: Job) -> None:
        left = tokens_left(self.limit, len(job.ids))
        check_memory(self.model, len(job.ids), self.kv_format)
        if left is not None and not 0 < job.max_tokens <= left:
            job.max_tokens, job.limit = left, self.limit
        if self.prompt_cache is not None:
            prompts, turns = self.prompt_cache, job.turns
            job.reuse = Reuse(job.resources, prompts, self.model, turns, self.drafter, job.ids, self.kv_format)
        job.conversation = open_cache(self.model, job.reuse and job.reuse.conversation, self.kv_format)
        cached = job.reuse.length if job.reuse else 0
        job.reply.cached_tokens = cached
        if not self.together:
            auto = isinstance(self.length, LaneLengths)
            job.stats.reason = ALONE_FULL if auto and self.drafter else ALONE
        elif isinstance(self.length, LaneLengths) and not self._running:
            self._measure(job.ids)
        checkpoints = job.reuse and job.reuse.checkpoints
        job.steps = prefill(
            self.model, job.conversation, job.ids[cached:], self.drafter, self.prefill_step_size, checkpoints
        )

    def _measure(self, prompt: list[int]) -> None:
        """Before the first of several requests: what rounds of so many take, and of as many as there were before."""
        together = self.length(min(self.max_lanes, 1 + len(self._waiting)))
        for lanes, length in self.length.lengths.items():
            if self.calibrate and (length is together or length.context):
                measure(self.model, self.drafter, length, prompt, lanes, self.lookahead)
        self.length.keep()

    def _take_in(self, job: Job) -> None:
        clock = time.perf_counter()
        try:
            more = next(job.steps, None) is not None
            job.stats.prefill_seconds += time.perf_counter() - clock
            if more:
                return
        except Exception as error:
            self._prefilling = None
            self._end(job, error)
            return
        job.sequence = Sequence(job.conversation, job.policy, list(job.ids), job.stop_tokens, job.max_tokens, job.stats)
        self._prefilling = None
        self._running.append(job)
        if isinstance(self.length, LaneLengths):
            self.length.join(len(job.ids))

    def _decode(self) -> None:
        """A round for each batch, of those that have just come in too."""
        for job in self._running:
            self._place(job)
        for key, batch in [*self._batches.items()]:
            jobs = {job.sequence: job for job in self._running if job.batch is batch}
            try:
                for sequence, token in batch.round() if jobs else ():
                    if token is not None:
                        self._deliver(jobs[sequence], token)
            except Exception as error:
                self._drop(key)
                for job in jobs.values():
                    self._running.remove(job)
                    self._end(job, error)
                continue
            self._retire([job for sequence, job in jobs.items() if sequence.over])

    def _place(self, job: Job) -> None:
        """Have a job in the batch that it belongs to: one changes over where its keys begin to be quantized."""
        key = None
        if not self.together:
            key = job.sequence
        elif self.kv_format is not None:
            key = len(job.conversation.processed) >= self.kv_format.start
        if key not in self._batches:
            alone_full = not self.together and isinstance(self.length, LaneLengths)
            length = None if self.drafter is None or alone_full else self.length
            self._batches[key] = Batch(self.model, self.drafter, length, lookahead=self.lookahead)
        if job.batch is self._batches[key]:
            return
        if job.batch is not None:
            job.batch.part(job.sequence)
        job.batch = self._batches[key]
        job.batch.join([job.sequence])

    def _deliver(self, job: Job, token: Token) -> None:
        try:
            job.sequence.over |= job.deliver(token)
        except Exception as error:
            job.sequence.fail(error)

    def _retire(self, jobs: list[Job]) -> None:
        for job in jobs:
            self._running.remove(job)
            if self.prompt_cache is not None and job.batch is not None:
                job.batch.part(job.sequence)
        for batch in {job.batch for job in jobs if job.batch is not None}:
            batch.settle()
        for job in jobs:
            if not self.together and job.batch is not None:
                self._drop(job.sequence)
            self._end(job, job.sequence.error)

    def _end(self, job: Job, error: Exception | None = None) -> None:
        if job.over:
            return
        job.over = True
        try:
            if job.reuse is not None and error is None and not job.cancelled:
                job.reuse.answered(job.reply.answer)
        except Exception as failure:
            error = error or failure
        finally:
            job.resources.close()
            job.batch = job.steps = None
            if job.reuse is None:
                # The job may be held for its figures, long after.
                job.conversation = job.sequence = None
            if self.drafter is not None and error is None:
                self.model.count_first(self.drafter, job.stats.proposed, job.stats.first_accepted)
            job.done(error)
