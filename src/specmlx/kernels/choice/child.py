"""The process that checks an operator's variants, and races them.

A job comes as JSON on stdin, a line of JSON for every step goes to stdout. Before a variant runs its name is printed,
so that the parent knows which one hung or took the process down.
"""

import json
import sys
import time
from collections.abc import Sequence
from pkgutil import resolve_name
from statistics import median
from typing import Any

import mlx.core as mx

from specmlx.kernels.choice.operator import REFERENCE, STOCK, Operator

# Weights are copied until no cache holds them all, and every run goes through the copies.
ROTATED_BYTES, MAX_COPIES = 512 * 2**20, 64
REPEATS = 5
# A variant that takes so many times as long as the fastest at its first run is not run again for that row count.
HOPELESS = 4.0
# In mlx's message where a kernel was built but its run failed.
_FAULT = "ommand buffer"


def say(**step: Any) -> None:
    print(json.dumps(step), flush=True)


def check(operator: Operator, key: dict, rows: Sequence[int], variants: list[str]) -> list[str]:
    """The variants that answer as the reference does for every row count."""
    small, limit, right = operator.small(key), operator.tolerance(key), list(variants)
    for n in rows:
        inputs = operator.inputs(small, n, seed=n, exact=True)
        # On the CPU: independent of what is being checked, and in full float32.
        with mx.stream(mx.cpu):
            want = operator.run(REFERENCE, inputs).astype(mx.float32)
            scale = mx.abs(want).max().item()
        for variant in list(right):
            say(start=variant)
            try:
                got = operator.run(variant, inputs).astype(mx.float32)
                error = mx.abs(got - want).max().item()
            except (RuntimeError, ValueError, TypeError) as problem:
                why = f"fails: {' '.join(str(problem).split())[:300]}"
            else:
                if error <= limit * scale:
                    continue
                why = f"wrong by {error:.2g} for {n} rows, values up to {scale:.2g}"
            right.remove(variant)
            say(dropped=variant, why=why)
            if _FAULT in why:
                # After a fault Metal refuses whatever this process sends: the others need another one.
                sys.exit()
    return right


def race(operator: Operator, key: dict, rows: Sequence[int], variants: list[str]) -> None:
    """Time the variants by turns, so that a change of clock or heat meets all of them."""
    copies = max(1, min(MAX_COPIES, ROTATED_BYTES // operator.nbytes(key)))
    for n in rows:
        inputs = [operator.inputs(key, n, seed=copy, exact=False) for copy in range(copies)]
        mx.eval(inputs)
        seconds: dict[str, list[float]] = {variant: [] for variant in variants}
        for repeat in range(REPEATS + 1):
            for variant in variants if repeat % 2 else reversed(variants):
                if repeat > 1 and seconds[variant][0] > HOPELESS * min(times[0] for times in seconds.values()):
                    continue
                say(start=variant)
                begun = time.perf_counter()
                mx.eval([operator.run(variant, x) for x in inputs])
                if repeat:  # the first compiles
                    seconds[variant].append((time.perf_counter() - begun) / copies)
        say(rows=n, seconds={variant: median(times) for variant, times in seconds.items()})


def main() -> None:
    job = json.load(sys.stdin)
    operator = resolve_name(job["operator"])
    say(start=STOCK)
    right = check(operator, job["key"], job["rows"], job["variants"])
    trusted = [] if STOCK in operator.variants(job["key"]) else [STOCK]
    if right and operator.raced:
        race(operator, job["key"], job["rows"], right + trusted)
    say(done=True)


if __name__ == "__main__":
    main()
