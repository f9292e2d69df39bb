"""For apps: one worker thread owns the device, and answers requests from any thread together."""

import asyncio
import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import mlx.core as mx

from specmlx.cache.quantized import KVFormat
from specmlx.cache.store import PromptCache
from specmlx.formats.values import check
from specmlx.generation.context_limits import tokens_left
from specmlx.generation.responses import GenerationResponse, Request
from specmlx.generation.scheduler import Scheduler
from specmlx.loading.load import AUTO

# Seconds for which the end of the program waits for a callable of a request's.
PATIENCE = 5.0


class QueueFull(RuntimeError):
    """The engine has as many requests waiting as it takes: try again later."""


class ResponseQueue:
    """An answer that is being made: iterate over it, in a thread or with `async for`; leaving off cancels it.

    It has one reader. The worker holds it weakly, as `request.queue()`.
    """

    def __init__(self, request: Request):
        self._request = request
        self._condition = threading.Condition()
        self._responses: deque[GenerationResponse] = deque()
        self._error: Exception | None = None
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future] | None = None
        self._process = os.getpid()
        self.ended = False
        request.queue = queue = weakref.ref(self, lambda _: setattr(request, "cancelled", True))
        request.on_end = lambda error: queue() and queue().put(None, error)

    def put(self, response: GenerationResponse | None, error: Exception | None = None) -> None:
        """One more, or None: no more. The reader gets those that are there first, then the error, if any."""
        with self._condition:
            if response is None:
                self.ended, self._error = True, error
            else:
                self._responses.append(response)
            self._condition.notify_all()
            if self._waiter is not None:
                (loop, future), self._waiter = self._waiter, None
                # The loop may have been closed meanwhile: nobody waits there any more.
                with suppress(RuntimeError):
                    loop.call_soon_threadsafe(lambda: future.done() or future.set_result(None))

    def __iter__(self) -> "ResponseQueue":
        return self

    def __next__(self) -> GenerationResponse:
        """Wait for the next response. Raises what ended the request, or RuntimeError after a fork."""
        self._check_process()
        with self._condition:
            self._condition.wait_for(self._ready)
            return self._pop(StopIteration)

    def __aiter__(self) -> "ResponseQueue":
        return self

    async def __anext__(self) -> GenerationResponse:
        """The same without holding a thread."""
        self._check_process()
        while True:
            with self._condition:
                if self._ready():
                    return self._pop(StopAsyncIteration)
                loop = asyncio.get_running_loop()
                future = loop.create_future()
                self._waiter = (loop, future)
            await future

    def text(self) -> str:
        """Wait for the whole text. Raises what ended the request."""
        return "".join(response.text for response in self)

    def cancel(self) -> None:
        """End the request at the engine's next step; responses that are there can still be read."""
        self._request.cancelled = True

    close = cancel

    async def aclose(self) -> None:
        self.cancel()

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(f"this request runs in process {self._process}, before the fork: nothing comes in here")

    def _ready(self) -> bool:
        return bool(self._responses) or self.ended

    def _pop(self, end: type[Exception]) -> GenerationResponse:
        if self._responses:
            return self._responses.popleft()
        raise self._error or end


class Engine:
    """Answers requests with `model` on one worker thread; up to `max_lanes` of them decode in the same passes.

    Requests begin in the order in which they were submitted, and every one that runs gets a round at each step; the
    prompt of a new one is taken in between rounds, `prefill_step_size` tokens at a time. A request that fails fails
    alone. An engine that is open when the program ends is closed.

    Args:
        model, tokenizer: of `specmlx.load`.
        draft_model, num_draft_tokens: as in `stream_generate`, for all requests.
        max_lanes: requests that decode together. max_waiting: requests beyond those that run; one more is refused.
        prompt_cache: a `PromptCache`: prompts are then whole conversations, of which only what is new is run.
        max_kv_size, kv_bits, kv_group_size, quantized_kv_start: as in `stream_generate`, for every request.
        calibrate: as in `stream_generate`, while no request runs.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        draft_model: Any = AUTO,
        num_draft_tokens: int | str | None = AUTO,
        max_lanes: int = 8,
        max_waiting: int = 256,
        prefill_step_size: int = 2048,
        prompt_cache: PromptCache | None = None,
        max_kv_size: int | None = None,
        kv_bits: int | str | None = None,
        kv_group_size: int = 64,
        quantized_kv_start: int = 5000,
        calibrate: bool = True,
    ):
        self.max_waiting = check("max_waiting", max_waiting)
        kv_format = KVFormat.read(kv_bits, kv_group_size, quantized_kv_start)
        pair = model, tokenizer, draft_model, num_draft_tokens
        options = max_lanes, prefill_step_size, prompt_cache, max_kv_size, kv_format, calibrate
        self._scheduler = Scheduler(*pair, *options)
        self._changed = threading.Condition()
        self._closing = self._calling = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._work, name="specmlx-engine", daemon=True)
        self._thread.start()
        atexit.register(self._leave)

    def submit(
        self,
        prompt: str | mx.array | Sequence[int],
        max_tokens: int = 256,
        *,
        seed: int | None = None,
        stop: str | Sequence[str] | None = (),
        sampler: Callable[[mx.array], mx.array] | None = None,
        logits_processors: Sequence[Callable[[mx.array, mx.array], mx.array]] | None = None,
    ) -> ResponseQueue:
        """Queue a request; options as `stream_generate`'s. May be called from any thread.

        Raises ValueError for a bad option or prompt (one that is too long, too), QueueFull, and RuntimeError once the
        engine is closed or in a process that was forked since.
        """
        if os.getpid() != self._process:
            raise RuntimeError(f"the engine runs in process {self._process}, before the fork: make a new one here")
        request = self._scheduler.request(prompt, max_tokens, seed, stop, sampler, logits_processors)
        request.policy.call = self._call
        tokens_left(self._scheduler.limit, len(request.ids))
        with self._changed:
            if self._closing:
                raise RuntimeError("the engine is closed: make a new one")
            if (waiting := self._scheduler.waiting) >= self.max_waiting:
                raise QueueFull(f"{waiting} requests are waiting already (max_waiting): try again later")
            responses = ResponseQueue(request)
            self._scheduler.add(request)
            self._changed.notify()
        return responses

    def close(self) -> None:
        """Cancel what is left, and wait for the worker to end. May be called more than once."""
        if self._stop() and threading.current_thread() is not self._thread:
            self._thread.join()
            atexit.unregister(self._leave)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _stop(self) -> bool:
        """Have the worker end; whether it is one of this process, not of one that it was forked from."""
        if os.getpid() != self._process:
            return False
        with self._changed:
            self._closing = True
            self._changed.notify()
        return True

    def _leave(self) -> None:
        """Close at the end of the program: a thread that is in mlx when the interpreter ends would abort it."""
        until = time.monotonic() + PATIENCE
        ours = self._stop()
        while ours and self._thread.is_alive() and not (self._calling and time.monotonic() > until):
            self._thread.join(0.1)

    def _call(self, function: Callable, *args: Any) -> Any:
        """Run a request's own callable. Whatever it raises ends that request only, SystemExit too."""
        self._calling = True
        try:
            return function(*args)
        except BaseException as error:
            # A reader would take a StopIteration for the end of the text.
            if isinstance(error, Exception) and not isinstance(error, (StopIteration, StopAsyncIteration)):
                raise
            raise RuntimeError(f"a callable of this request raised {error!r}") from error
        finally:
            self._calling = False

    def _work(self) -> None:
        scheduler = self._scheduler
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closing or not scheduler.idle)
                if self._closing:
                    scheduler.close(RuntimeError("the engine was closed"))
                    return
                for request, response in scheduler.step():
                    if queue := request.queue():
                        queue.put(response)
        except BaseException as error:
            with self._changed:
                self._closing = True
            scheduler.close(RuntimeError(f"the engine's worker ended: {error}"))
            raise
        finally:
            # What this thread compiled dies with its streams, before the interpreter does.
            mx.clear_streams()
