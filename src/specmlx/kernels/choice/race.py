"""A race in a child process: a GPU that hangs can't be stopped from inside, a process can be killed."""

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator

from specmlx.kernels.choice.operator import STOCK, Key, Operator
from specmlx.kernels.choice.table import Outcome

# From one step to the next; the first compiles a kernel.
SECONDS = 30.0
# Loading mlx and the operator takes a second or two; more on a busy machine.
START_SECONDS = 60.0


class NoRace(RuntimeError):
    """No race can be held on this machine, or not now; nothing is known of the kernels."""


def race(operator: Operator, key: Key, seconds: float = SECONDS, rows: tuple[int, ...] | None = None) -> Outcome:
    """Check the variants against the reference, then time them and stock mlx; drop what fails, is wrong or hangs.

    seconds: how long a step of a variant may take. rows: instead of the operator's own row counts. After a hang or a
    crash the others are raced again without it.
    Raises NoRace where no child process gets as far as to begin.
    """
    rows = operator.rows if rows is None else rows
    outcome, variants = Outcome(), operator.variants(key)
    while left := [v for v in variants if v not in outcome.dropped]:
        outcome.seconds.clear()
        running = None
        for step in _steps(operator, key, rows, left, seconds):
            if "ready" in step:
                running = STOCK
            elif "start" in step:
                running = step["start"]
            elif "dropped" in step:
                outcome.dropped[step["dropped"]] = step["why"]
            elif "again" in step:
                break
            elif "rows" in step:
                outcome.seconds[step["rows"]] = step["seconds"]
            elif "lost" in step:
                if running is None:
                    raise NoRace(f"the process that checks them {step['lost']}")
                # Without a variant to blame, ours can't be had at all.
                blamed = [running] if running in left else left
                outcome.dropped.update(dict.fromkeys(blamed, step["lost"]))
                break
        else:
            break
    if len(outcome.dropped) == len(variants):
        outcome.seconds.clear()
    return outcome


def _steps(operator: Operator, key: Key, rows: tuple[int, ...], variants: list[str], seconds: float) -> Iterator[dict]:
    """The child's lines; the last is {"lost": why} if it hung or ended before it was done."""
    job = {"operator": operator.address, "key": dict(key), "rows": rows, "variants": variants}
    # MLX_ENABLE_TF32 as it is: what is checked is what will serve.
    environment = {**os.environ, "PYTHONPATH": _import_path()}
    try:
        errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        child = subprocess.Popen(
            # -P: no file beside the user's own may stand in for a module.
            [interpreter(), "-P", "-m", "specmlx.kernels.choice.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            encoding="utf-8",
            errors="replace",
            env=environment,
        )
    except OSError as problem:
        raise NoRace(f"the process that checks them can't be started: {problem}") from None
    lines: queue.Queue[str] = queue.Queue()
    # Behind the last line an empty one.
    reader = threading.Thread(target=lambda: [*map(lines.put, child.stdout), lines.put("")], daemon=True)
    try:
        reader.start()
        with contextlib.suppress(BrokenPipeError):  # it ended at once: the lines below say so
            child.stdin.write(json.dumps(job))
            child.stdin.close()
        wait = START_SECONDS
        while True:
            try:
                line = lines.get(timeout=wait)
            except queue.Empty:
                yield {"lost": f"hangs: no answer within {wait:g} s"}
                return
            if not line:
                child.wait()
                errors.seek(0)
                last = (errors.readlines() or ["no message"])[-1].strip()
                yield {"lost": f"ends the process with {child.returncode}: {last}"}
                return
            if (step := _step(line)) is None:
                continue
            if "done" in step:
                return
            wait = seconds
            yield step
    finally:
        child.kill()
        child.wait()
        reader.join(1.0)
        child.stdout.close()
        errors.close()


def interpreter(executable: str | None = sys.executable, frozen: bool = hasattr(sys, "frozen")) -> str:
    """The Python that runs this. Raises NoRace inside an app, whose executable would start the app once more."""
    name = os.path.basename(executable or "")
    if frozen or "python" not in name.lower():
        app = name or "one without an executable"
        raise NoRace(f"an app ({app}) can't start Python to check them: load the model once by specmlx generate")
    return executable


def _import_path() -> str:
    """Where this process finds its modules: "" in sys.path is the directory that it runs in."""
    return os.pathsep.join(os.path.abspath(path) for path in sys.path)


def _step(line: str) -> dict | None:
    """A line of the child's, or None for one that something else printed, as a site's customization may."""
    try:
        step = json.loads(line)
    except ValueError:
        return None
    return step if isinstance(step, dict) else None
