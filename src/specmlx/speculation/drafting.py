"""Keeping a drafter's context in step with the conversation, whatever becomes of the rows that it was shown."""

from specmlx.drafters.proposal import Drafter
from specmlx.state.conversation import Conversation, Draft, Observable


def observe(conversation: Conversation, drafter: Drafter | None) -> None:
    """Let the drafter see the committed rows that it has not seen; one that is new to the conversation starts here."""
    rows, conversation.unobserved = conversation.unobserved, None
    draft = conversation.draft
    if drafter is None:
        conversation.draft = None
        return
    end, count = conversation.states.length, conversation.states.count
    missing = end - draft.end if draft is not None and draft.drafter is drafter else -1
    if missing == 0 or (missing == count and (draft.ahead or rows is not None)):
        context = draft.context
        if draft.ahead:
            context.settle(missing)
        elif missing:
            drafter.observe(context, rows.tokens, rows.features, missing)
    else:
        # It is new, or missed rows by an interrupt or a failure half-way, and would be wrong from then on.
        context = drafter.new_context(1, start=end)
    conversation.draft = Draft(drafter, context, end)


def observe_ahead(conversation: Conversation, rows: Observable, count) -> None:
    """Let the drafter see the first `count` rows of the open pass (an int, or int32 `[B]`, which is not read).

    The next `observe` settles how many of them stayed.
    """
    # Taken out meanwhile: a context that is left half-way is not used again.
    draft, conversation.draft = conversation.draft, None
    draft.drafter.observe(draft.context, rows.tokens, rows.features, count)
    conversation.draft = draft._replace(ahead=True)
