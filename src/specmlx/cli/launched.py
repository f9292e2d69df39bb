"""A command under mlx.launch: several processes that answer together, of which the first one speaks."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from specmlx.cli.terminal import answers, note

# What mlx.launch, and mpirun, tell a process.
_RANKS = ("MLX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def launched_rank() -> int | None:
    """This process's rank as its launcher has it; None for a process that was started by itself."""
    found = next((os.environ[name] for name in _RANKS if name in os.environ), "")
    return int(found) if found.isdigit() else None


def join() -> Any:
    """The mlx group of the processes that were started together, once all are there; None for one alone.

    Raises ValueError, in one line, where they can't reach one another.
    """
    if launched_rank() is None:
        return None
    import mlx.core as mx

    from specmlx.parallel.group import several

    try:
        return several(mx.distributed.init())
    except (RuntimeError, ValueError) as error:
        # The others are still waiting for this one, and can't tell.
        text = f"rank {launched_rank()} can't reach the others: {' '.join(str(error).split())}"
        if launched_rank():
            note(f"Error: {text}")
        raise ValueError(text) from None


@contextlib.contextmanager
def joined() -> Iterator[Any]:
    """The mlx group of processes that run this command together, None for one alone.

    All ranks but the first are silent, but for the reason of an error that is theirs alone. mlx.launch ends the other
    ranks once one has ended with an error.
    """
    group = join()
    if group is None:
        yield None
        return
    import mlx.core as mx

    from specmlx.parallel.group import AskedDifferently, FailedElsewhere

    rank = group.rank()
    try:
        with contextlib.ExitStack() as stack:
            if rank:
                nowhere = stack.enter_context(open(os.devnull, "w"))
                stack.enter_context(contextlib.redirect_stdout(nowhere))
                stack.enter_context(contextlib.redirect_stderr(nowhere))
                stack.enter_context(answers())
            yield group
            # A rank that ended earlier would leave the others' last collectives without it.
            mx.eval(mx.distributed.all_sum(mx.array(1), group=group))
    except Exception as error:
        if rank and not isinstance(error, (AskedDifferently, FailedElsewhere)):
            note(f"Error: rank {rank}: {' '.join(str(error).split())}")
        raise
