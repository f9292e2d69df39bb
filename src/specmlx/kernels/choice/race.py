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

from specmlx.kernels.choice.operator import Key, Operator
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
    outcome, variants = Outcome(), operator.variants(key)
    while left := [v for v in variants if v not in outcome.dropped]:
        outcome.seconds.clear()
        running = None
        job = {"operator": operator.address, "key": dict(key), "rows": rows or operator.rows, "variants": left}
        for step in _steps(job, seconds):
            running = step.get("start", running)
            if "dropped" in step:
                outcome.dropped[step["dropped"]] = step["why"]
            elif "rows" in step:
                outcome.seconds[step["rows"]] = step["seconds"]
            elif "lost" in step:
                if running is None:
                    raise NoRace(f"the process that checks them {step['lost']}")
                # Without a variant to blame, ours can't be had at all.
                blamed = [running] if running in left else left
                outcome.dropped = dict.fromkeys(blamed, step["lost"]) | outcome.dropped
                break
        else:
            break
    if len(outcome.dropped) == len(variants):
        outcome.seconds.clear()
    return outcome


def _steps(job: dict, seconds: float) -> Iterator[dict]:
    """The child's lines; the last is {"lost": why} if it hung or ended before it was done."""
    # "" in sys.path is the directory that this process runs in. MLX_ENABLE_TF32 as it is: what is checked will serve.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path)}
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
        while line := lines.get(timeout=wait):
            try:
                step = json.loads(line)
            except ValueError:
                step = None
            if not isinstance(step, dict):
                continue  # something else printed it, as a site's customization may
            if "done" in step:
                return
            wait = seconds
            yield step
        child.wait()
        errors.seek(0)
        last = (errors.readlines() or ["no message"])[-1].strip()
        yield {"lost": f"ends the process with {child.returncode}: {last}"}
    except queue.Empty:
        yield {"lost": f"hangs: no answer within {wait:g} s"}
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
