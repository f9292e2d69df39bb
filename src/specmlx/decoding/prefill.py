"""The prompt, up to its last token, which is the first anchor."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import mlx.core as mx

from specmlx.cache.conversation import Conversation, Observable
from specmlx.cache.snapshots import prefill_chunks
from specmlx.decoding.round import Target, observe
from specmlx.drafters.proposal import Drafter

# Rows behind the prompt that buffers make room for at once.
_ANSWER = 256

Checkpoints = Mapping[int, Callable[[Conversation], None]]
"""What is called once a conversation has as many rows, by their number."""


def prefill(
    target: Target,
    conversation: Conversation,
    prompt: Sequence[int],
    drafter: Drafter | None,
    step_size: int,
    checkpoints: Checkpoints | None = None,
    later: bool = False,
) -> Iterator[int]:
    """Run everything before the prompt's last token, which becomes pending; yields how much of the prompt is in.

    With `later`, the drafter is shown the last rows when it is to propose.
    """
    observe(conversation, drafter, later)
    before = [] if conversation.pending is None else [conversation.pending]
    ids, checkpoints = [*before, *prompt[:-1]], checkpoints or {}
    start = conversation.states.length
    conversation.states.reserve(start + len(ids) + _ANSWER)
    window = getattr(drafter, "window", None)
    yield 0
    try:
        conversation.processed += ids
        at = start
        for stop, observed in prefill_chunks(start, start + len(ids), checkpoints, window):
            watching = drafter if observed else None
            if watching:
                observe(conversation, drafter, later)
            rows = mx.array([ids[at - start : stop - start]], dtype=mx.int32)
            taps = watching.tap_ids if watching else ()
            for tokens, features in target.prefill(conversation.states, rows, taps, step_size):
                if watching:
                    conversation.unobserved = Observable(tokens, features)
                    observe(conversation, drafter, later and stop not in checkpoints)
                    mx.eval(conversation.draft_arrays())
                at += tokens.shape[1]
                yield at - start - len(before)
            if stop in checkpoints:
                checkpoints[stop](conversation)
    finally:
        conversation.settle()
    conversation.pending = prompt[-1]
