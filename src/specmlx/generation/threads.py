"""How a thread that ran mlx ends."""

import threading

import mlx.core as mx

_ends = threading.local()


class _End:
    """Thread-local: Python drops it in its thread, once the thread's own code is over and before others can join it."""

    def __init__(self) -> None:
        # Functions of its own, since a module's may be gone by then.
        self._thread, self._current, self._clear = threading.get_native_id(), threading.get_native_id, mx.clear_streams

    def __del__(self) -> None:
        if self._current() == self._thread:
            self._clear()


def clear_streams_at_end() -> None:
    """Have the current thread drop its mlx streams, and what it compiled, when it ends; the main thread needs none.

    mlx (0.32.4) drops a thread's compiled functions, which hold Python objects, after Python has let go of the thread.
    The process aborts where the interpreter ends meanwhile.
    """
    thread, main = threading.current_thread(), threading.main_thread()
    # A thread that Python did not start may come back with other thread-locals. A greenlet is in the main thread.
    if isinstance(thread, threading._DummyThread) or threading.get_native_id() == main.native_id:
        return
    if not hasattr(_ends, "end"):
        _ends.end = _End()
