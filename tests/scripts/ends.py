"""Ends the program in several ways while an engine or a thread generates: prints how each of them ended, as JSON.

Each case is a fork of this process, made before mlx runs: importing everything anew would take most of the time.
"""

import asyncio
import json
import os
import signal
import sys
import tempfile
import threading
import time

import mlx.core as mx
from rig import SMALL, small_tokenizer, tiny

from specmlx import Engine, stream_generate
from specmlx.generation import engine

PROMPT = [7, 8, 9] * 20
kept = []


def same(tokens, logits):
    return logits


def running(model, tokenizer, processor=same):
    """Requests that take turns with the host, under way when the program ends; the engine is never closed."""
    app = Engine(model, tokenizer)
    requests = [app.submit(PROMPT, 3000, logits_processors=[processor]) for _ in range(3)]
    next(requests[0])
    kept.extend([app, *requests])
    return app, requests


def normally(model, tokenizer):
    running(model, tokenizer)


def by_system_exit(model, tokenizer):
    running(model, tokenizer)
    raise SystemExit(5)


def by_an_error(model, tokenizer):
    running(model, tokenizer)
    raise RuntimeError("the app's own")


def in_asyncio(model, tokenizer):
    async def main():
        requests = [Engine(model, tokenizer).submit(PROMPT, 3000, logits_processors=[same]) for _ in range(2)]
        kept.append([asyncio.create_task(request.__anext__()) for request in requests])
        await asyncio.sleep(0.1)
        raise SystemExit(6)

    asyncio.run(main())


def in_a_callable(model, tokenizer):
    running(model, tokenizer, lambda tokens, logits: time.sleep(0.1) or logits)
    raise SystemExit(7)


def in_a_callable_that_never_returns(model, tokenizer):
    engine.PATIENCE, there = 0.2, threading.Event()
    processor = lambda tokens, logits: there.set() or threading.Event().wait()  # noqa: E731
    kept.append(Engine(model, tokenizer).submit(PROMPT, 3, logits_processors=[processor]))
    there.wait()
    raise SystemExit(8)


def behind_a_thread(model, tokenizer):
    def work():
        # mlx keeps it for the thread; it is one operation, which needs no compiler.
        kept.append(mx.compile(lambda x: x @ x))
        mx.enable_compile()
        kept[-1](mx.ones((2, 2)))
        mx.disable_compile()
        kept.append(stream_generate(model, tokenizer, PROMPT, 9))
        next(kept[-1])

    thread = threading.Thread(target=work)
    thread.start()
    # What the thread does behind its Python code falls into the interpreter's end, which takes its time.
    sys.setswitchinterval(60)
    kept.append(Slow())
    thread.join()
    raise SystemExit(9)


class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(0.2)


def forked(model, tokenizer):
    app, requests = running(model, tokenizer)
    child = os.fork()
    if child == 0:
        app.close()
        for attempt in (lambda: app.submit(PROMPT), lambda: next(requests[0]), lambda: asyncio.run(first(requests[0]))):
            try:
                attempt()
            except RuntimeError as error:
                assert "before the fork" in str(error), error
            else:
                os._exit(1)
        raise SystemExit(10)
    raise SystemExit(ended(child))


async def first(request):
    return await request.__anext__()


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


CASES = {
    "normally": normally,
    "SystemExit": by_system_exit,
    "an error": by_an_error,
    "asyncio": in_asyncio,
    "a callable": in_a_callable,
    "a callable that never returns": in_a_callable_that_never_returns,
    "a thread": behind_a_thread,
    "a forked process": forked,
}

if __name__ == "__main__":
    tokenizer = small_tokenizer(tempfile.mkdtemp())
    children = {}
    for name, end in CASES.items():
        if (child := os.fork()) == 0:
            signal.alarm(60)
            sys.stderr = open(os.devnull, "w")
            end(tiny(0, **SMALL), tokenizer)
            sys.exit(0)
        children[name] = child
    print(json.dumps({name: ended(child) for name, child in children.items()}))
