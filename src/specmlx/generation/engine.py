"""For apps: one worker thread owns the device, and answers requests from any thread together."""

import atexit
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from specmlx.cache.quantized import KVFormat
from specmlx.cache.store import PromptCache
from specmlx.formats.values import check
from specmlx.generation.context_limits import tokens_left
from specmlx.generation.request import Request
from specmlx.generation.response_queue import ResponseQueue
from specmlx.generation.scheduler import Scheduler
from specmlx.loading.load import AUTO

# Seconds for which the end of the program waits for a callable of a request's.
PATIENCE = 5.0


class QueueFull(RuntimeError):
    """The engine has as many requests waiting as it takes: try again later."""


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
        max_waiting = check("max_waiting", max_waiting)
        self._scheduler = Scheduler(
            model,
            tokenizer,
            draft_model,
            num_draft_tokens,
            max_lanes,
            prefill_step_size,
            prompt_cache,
            max_kv_size,
            KVFormat.read(kv_bits, kv_group_size, quantized_kv_start),
            calibrate,
        )
        self.max_waiting = max_waiting
        self._changed = threading.Condition()
        self._new: list[Request] = []
        self._closing = False
        self._calling = False
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
        request = self._scheduler.request(
            prompt,
            max_tokens,
            seed=seed,
            stop=stop,
            sampler=sampler,
            logits_processors=logits_processors,
        )
        request.policy.call = self._call
        tokens_left(self._scheduler.limit, len(request.ids))
        with self._changed:
            if self._closing:
                raise RuntimeError("the engine is closed: make a new one")
            waiting = len(self._new) + self._scheduler.waiting
            if waiting >= self.max_waiting:
                raise QueueFull(f"{waiting} requests are waiting already (max_waiting): try again later")
            responses = ResponseQueue(request)
            self._new.append(request)
            self._changed.notify()
        return responses

    def close(self) -> None:
        """Cancel what is left, and wait for the worker to end. May be called more than once."""
        if os.getpid() != self._process:
            return
        self._stop()
        if threading.current_thread() is not self._thread:
            self._thread.join()
            atexit.unregister(self._leave)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _stop(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()

    def _leave(self) -> None:
        """Close at the end of the program: a thread that is in mlx when the interpreter ends would abort it."""
        if os.getpid() != self._process:
            return
        self._stop()
        until = time.monotonic() + PATIENCE
        while self._thread.is_alive() and not (self._calling and time.monotonic() > until):
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
                    self._changed.wait_for(lambda: self._new or self._closing or not scheduler.idle)
                    closing = self._closing
                self._add_new()
                if closing:
                    scheduler.close(RuntimeError("the engine was closed"))
                    return
                for request, response in scheduler.step():
                    if queue := request.queue():
                        queue.put(response)
        except BaseException as error:
            with self._changed:
                self._closing = True
            self._add_new()
            scheduler.close(RuntimeError(f"the engine's worker ended: {error}"))
            raise
        finally:
            # What this thread compiled dies with its streams, before the interpreter does.
            mx.clear_streams()

    def _add_new(self) -> None:
        with self._changed:
            new, self._new = self._new, []
        for request in new:
            self._scheduler.add(request)
