"""Keeping a drafter's context in step with the conversation, whatever becomes of the rows that it was shown."""

import mlx.core as mx

from specmlx.drafters.proposal import Drafter
from specmlx.state.conversation import Conversation, Draft, Observable

# Passes without a proposal, and rows of them, that are kept until the drafter is shown them all at once.
_PASSES, _ROWS = 64, 1024


def observe(conversation: Conversation, drafter: Drafter | None, later: bool = False) -> None:
    """Let the drafter see the committed rows that it has not seen; one that is new to the conversation starts here.

    With `later`, a few rows may wait until it is to propose.
    """
    # Taken out meanwhile: a context that is left half-way is not used again.
    rows, draft = conversation.unobserved, conversation.draft
    conversation.unobserved = conversation.draft = None
    if drafter is None:
        return
    end, count = conversation.states.length, conversation.states.count
    missing = end - draft.known if draft is not None and draft.drafter is drafter else -1
    if missing == 0 or (missing == count and (draft.ahead or rows is not None)):
        if draft.ahead:
            draft.context.settle(missing)
            draft = Draft(drafter, draft.context, end)
        elif missing:
            draft = draft._replace(waiting=(*draft.waiting, (rows, missing)))
    else:
        # It is new, or missed rows by an interrupt, and would be wrong from then on.
        draft = Draft(drafter, drafter.new_context(1, start=end), end)
    if not later or len(draft.waiting) >= _PASSES or draft.known - draft.end >= _ROWS:
        draft = _caught_up(draft)
    conversation.draft = draft


def observe_ahead(conversation: Conversation, rows: Observable, count: int | mx.array) -> None:
    """Let the drafter see the first `count` rows of the open pass (an int, or int32 `[B]`, which is not read).

    The next `observe` settles how many of them stayed.
    """
    draft, conversation.draft = conversation.draft, None
    draft = _caught_up(draft)
    draft.drafter.observe(draft.context, rows.tokens, rows.features, count)
    conversation.draft = draft._replace(ahead=True)


def hand_over(conversation: Conversation, drafter: Drafter, to: Drafter) -> None:
    """Let a drafter that stands for another one, or the other way round, go on with its context."""
    if (draft := conversation.draft) is not None and draft.drafter is drafter:
        conversation.draft = draft._replace(drafter=to)


def _caught_up(draft: Draft) -> Draft:
    if not draft.waiting:
        return draft
    tokens = mx.concatenate([rows.tokens[:, :count] for rows, count in draft.waiting], axis=1)
    features = None
    if draft.waiting[0][0].features is not None:
        features = mx.concatenate([rows.features[:, :count] for rows, count in draft.waiting], axis=1)
    draft.drafter.observe(draft.context, tokens, features, tokens.shape[1])
    return Draft(draft.drafter, draft.context, draft.known)
