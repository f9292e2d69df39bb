"""Responses on their way from the worker thread to whoever reads them, in another thread or an event loop."""

import asyncio
import os
import threading
from collections import deque
from typing import Any


class Mailbox:
    """A queue with one end: items, then None or an exception. One reader, which may wait in a thread or in asyncio."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._items: deque[Any] = deque()
        self._ended = False
        self._error: Exception | None = None
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future] | None = None
        self._process = os.getpid()

    @property
    def ended(self) -> bool:
        return self._ended

    def put(self, item: Any) -> None:
        with self._condition:
            self._items.append(item)
            self._wake()

    def end(self, error: Exception | None = None) -> None:
        """No more items; the reader gets those that are there first, then the error, if any."""
        with self._condition:
            self._ended, self._error = True, error
            self._wake()

    def get(self) -> Any:
        """Wait for the next item. Raises StopIteration at the end, what ended it, or RuntimeError after a fork."""
        self._check_process()
        with self._condition:
            self._condition.wait_for(self._ready)
            return self._pop(StopIteration)

    async def get_async(self) -> Any:
        """`get` without holding a thread. Raises StopAsyncIteration at the end."""
        self._check_process()
        while True:
            with self._condition:
                if self._ready():
                    return self._pop(StopAsyncIteration)
                loop = asyncio.get_running_loop()
                future = loop.create_future()
                self._waiter = (loop, future)
            await future

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(f"this request runs in process {self._process}, before the fork: nothing comes in here")

    def _ready(self) -> bool:
        return bool(self._items) or self._ended

    def _pop(self, end: type[Exception]) -> Any:
        if self._items:
            return self._items.popleft()
        if self._error is not None:
            raise self._error
        raise end

    def _wake(self) -> None:
        self._condition.notify_all()
        if self._waiter is not None:
            (loop, future), self._waiter = self._waiter, None
            try:
                loop.call_soon_threadsafe(_resolve, future)
            except RuntimeError:
                # The loop has been closed meanwhile: nobody waits there any more.
                pass


def _resolve(future: asyncio.Future) -> None:
    if not future.done():
        future.set_result(None)
