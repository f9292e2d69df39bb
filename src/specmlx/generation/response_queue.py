"""Responses on their way from the worker thread to whoever reads them, in another thread or an event loop."""

import asyncio
import os
import threading
import weakref
from collections import deque
from contextlib import suppress

from specmlx.generation.request import Request
from specmlx.generation.responses import GenerationResponse


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
