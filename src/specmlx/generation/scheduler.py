"""Which request runs next: prompts are taken in one step at a time, between the rounds of those that decode."""

import math
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from specmlx.decoding.loop import Batch
from specmlx.decoding.prefill import prefill
from specmlx.decoding.stats import Timer
from specmlx.generation.context_limits import check_memory, context_limit, tokens_left
from specmlx.generation.prompt_cache import Reuse, close_cache, open_cache
from specmlx.generation.responses import GenerationResponse, Request
from specmlx.generation.settings import Settings
from specmlx.generation.threads import clear_streams_at_end
from specmlx.parallel.broadcast import ASKED, SharedLength, nobodys_noise, what_is_asked
from specmlx.parallel.group import agreed

TURNS = "this model's state can't hold several lanes: requests take turns"
# Rounds of requests that take turns can't be timed.
TURNS_FULL = f"{TURNS}, with as many drafted tokens as there can be"


class Scheduler(Settings):
    """Up to `max_lanes` requests decode together; the others wait in order. One thread drives it."""

    def __post_init__(self):
        super().__post_init__()
        # Of the first one, the prompt is being taken in once it has `steps`.
        self._waiting: list[Request] = []
        self._running: list[Request] = []
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
        return sum(request.steps is None for request in self._waiting)

    @property
    def idle(self) -> bool:
        return not (self._waiting or self._running)

    def add(self, request: Request) -> None:
        """Take a request in, from any thread."""
        self._waiting.append(request)

    def answer(self, request: Request) -> Iterator[GenerationResponse]:
        """Answer one request, here: a response for each token. Raises what ended it."""
        with self._at_work([request]):
            while not self.idle:
                for _, response in self.step():
                    yield response
        if request.error:
            raise request.error

    def run(self, requests: Iterable[Request]) -> Iterator[tuple[Request, GenerationResponse]]:
        """Answer requests, here: a response for each token, with its request. Leaving off drops what is left."""
        with self._at_work(requests):
            while not self.idle:
                # Take in prompts until no more can decode together.
                while self._take_in():
                    pass
                yield from self.step()

    @contextmanager
    def _at_work(self, requests: Iterable[Request]) -> Iterator[None]:
        from mlx_lm.generate import wired_limit

        clear_streams_at_end()
        self._waiting += requests
        with wired_limit(self.model):
            try:
                yield
            finally:
                self.close()

    def step(self) -> Iterator[tuple[Request, GenerationResponse]]:
        """One step of a prompt that is being taken in, if there is one, and one round of all that decode."""
        self._take_in()
        for request in self._running:
            batch, before = self._batch(request), request.batch
            if before is not batch:
                if before is not None:
                    before.part(request)
                request.batch = batch
                batch.join([request])
        for batch in [*self._batches.values()]:
            requests = [request for request in self._running if request.batch is batch]
            try:
                for request, token in batch.round() if requests else ():
                    if token is None:
                        continue
                    try:
                        response = request.respond(token)
                    except Exception as error:
                        request.fail(error)
                        continue
                    if response.finish_reason:
                        self._finish(request, response)
                    request.over |= request.cancelled
                    yield request, response
            except Exception as error:
                self._drop(batch)
                for request in requests:
                    self._running.remove(request)
                    self._end(request, error)
                continue
            if over := [request for request in requests if request.over]:
                self._retire(over)

    def close(self, error: Exception | None = None) -> None:
        """End every request, with an error or without a word more."""
        requests = [*self._waiting, *self._running]
        self._waiting, self._running = [], []
        for batch in [*self._batches.values()]:
            self._drop(batch)
        for request in requests:
            request.cancelled = True
            self._end(request, error)

    def _drop(self, batch: Batch) -> None:
        self._batches = {key: each for key, each in self._batches.items() if each is not batch}
        self._passes += batch.rounds
        # What a profiled round takes, others don't.
        if self.auto and not self.profile:
            self.length.keep()

    def _take_in(self) -> bool:
        """Let cancelled requests go, and run one step of the next prompt, if there is one that may begin."""
        for request in [*self._waiting, *self._running]:
            if request.cancelled and request in self._waiting:
                self._waiting.remove(request)
                self._end(request)
            elif request.cancelled:
                request.over = True
                self._retire([request])
        if not self._waiting:
            return False
        request = self._waiting[0]
        try:
            if request.steps is None:
                if not self._may_begin(request):
                    return False
                self._begin(request)
            clock, total = time.perf_counter(), len(request.ids)
            done = next(request.steps, None)
            if request.progress:
                request.progress(total if done is None else request.cached_tokens + done, total)
            request.conversation.check(request.owner)
            request.stats.prefill_seconds += time.perf_counter() - clock
        except Exception as error:
            self._waiting.remove(request)
            self._end(request, error)
            return True
        if done is None:
            self._waiting.remove(request)
            self._running.append(request)
            if self.auto and not self.alone:
                self.length.context = max(self.length.context, total)
        return True

    def _may_begin(self, request: Request) -> bool:
        """Whether there are a lane for it and, beside others, memory."""
        if len(self._running) >= self.max_lanes:
            return False
        # Lanes' keys are in one buffer, which is as long for each as the longest needs it.
        rows = [len(request.ids), *(len(each.conversation.processed) for each in self._running)]
        try:
            check_memory(self.model, len(rows) * max(rows), self.kv_format)
        except ValueError:
            return not self._running
        return True

    def _begin(self, request: Request) -> None:
        model, group = self.model, self.model.sharding_group
        with agreed(group, *ASKED) as asked:
            self._open(request)
            if group is not None:
                limits = (request.max_tokens, self.prefill_step_size, self.kv_format, self.lookahead)
                stop = (sorted(request.stop_tokens), list(request.stops.stops))
                ids = [*request.conversation.tokens, *request.ids]
                asked |= what_is_asked(ids, request.policy, self.drafter, self.length, stop, limits)
        if group is not None and request.policy.seed is None:
            request.policy = request.policy.with_noise(nobodys_noise(group))
        request.owner = request.conversation.claim()
        if not self.together:
            request.reason = request.stats.reason = TURNS_FULL if self.auto else TURNS
        elif self.auto and not self._running:
            self._measure(request)
        later = self.alone and self._batch(request).choose(1) == 0
        request.steps = prefill(
            model,
            request.conversation,
            request.ids[request.cached_tokens :],
            self.drafter,
            self.prefill_step_size,
            request.reuse and request.reuse.checkpoints,
            later,
        )

    def _measure(self, request: Request) -> None:
        """Before the first of several requests: what rounds of so many take, and of as many as there were before."""
        if self.alone:
            self.measure(self.length, request.ids)
            self.length.context = len(request.conversation.tokens) + len(request.ids) - request.cached_tokens
            return
        together = self.length(min(self.max_lanes, len(self._waiting)))
        for lanes, length in self.length.lengths.items():
            if length is together or length.context:
                self.measure(length, request.ids, lanes)
        self.length.keep()

    def _open(self, request: Request) -> None:
        """Find the conversation that the request goes on with, and how long it may get."""
        model, ids, cache = self.model, request.ids, self.prompt_cache
        if self.caching:
            tokens_left(self.limit, len(ids))
            check_memory(model, len(ids), self.kv_format)
            request.reuse = Reuse(request.resources, cache, model, self.turns, self.drafter, ids, self.kv_format)
            cache, request.cached_tokens = request.reuse.conversation, request.reuse.length
        request.conversation = conversation = open_cache(model, cache, self.kv_format)
        limit = context_limit(model, self.max_kv_size, conversation.max_kv_size)
        total = len(conversation.tokens) + len(ids) - request.cached_tokens
        left = tokens_left(limit, total)
        check_memory(model, total - len(conversation.processed), self.kv_format)
        if left < math.inf and not 0 < request.max_tokens <= left:
            request.max_tokens, request.limit = left, limit

    def _batch(self, request: Request) -> Batch:
        """The batch that a request belongs to now: it changes over where its keys begin to be quantized."""
        key, length, group = None, self.length, self.model.sharding_group
        if not self.together:
            key, length = request, None if self.auto else length
        elif self.kv_format is not None and not self.alone:
            key = len(request.conversation.processed) >= self.kv_format.start
        if key not in self._batches:
            length = SharedLength(length, group) if group is not None and self.auto else length
            self._batches[key] = self.batch(length, Timer(request.stats) if self.profile else None)
        return self._batches[key]

    def _finish(self, request: Request, last: GenerationResponse) -> None:
        """A request came to its end: say what its user has to know."""
        request.over, stats, drafter = True, request.stats, self.drafter
        if request.batch.timer:
            request.batch.timer.finish()
            last.stats = stats.snapshot()
        # What nobody asked for may find nothing.
        if self.alone and drafter not in (None, self.model.fallback) and stats.rounds > 1 and stats.proposed == 0:
            if not self.auto or self.length.reason is None:
                warnings.warn("the drafter was loaded but never proposed a token", stacklevel=5)
        if drafter is not None:
            self.model.count_first(drafter, stats.proposed, stats.first_accepted)
        if request.limit and last.finish_reason == "length":
            most, what = request.limit
            warnings.warn(f"the answer ends here: the conversation has {most} tokens ({what})", stacklevel=5)

    def _retire(self, requests: list[Request]) -> None:
        for request in requests:
            self._running.remove(request)
            if self.caching and request.batch is not None:
                request.batch.part(request)
        for batch in {request.batch for request in requests if request.batch is not None}:
            batch.settle()
        for request in requests:
            if request.batch is not None and (self.alone or not self.together):
                self._drop(request.batch)
            self._end(request, request.error)

    def _end(self, request: Request, error: Exception | None = None) -> None:
        if request.ended:
            return
        request.ended, request.error = True, error
        request.batch = request.steps = None
        conversation, reuse = request.conversation, request.reuse
        try:
            if conversation is not None and conversation.owned_by(request.owner):
                conversation.settle()
                close_cache(self.model, self.prompt_cache, conversation, request.owner)
            if reuse is not None and error is None and (self.alone or not request.cancelled):
                reuse.answered(request.text)
        except Exception as failure:
            request.error = error or failure
        finally:
            request.resources.close()
            if reuse is None:
                # The request may be kept for its figures, long after.
                request.conversation = None
            request.on_end(request.error)
