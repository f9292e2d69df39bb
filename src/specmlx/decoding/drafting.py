"""A drafter's contexts, kept in step with what is committed, whatever becomes of the rows that it was shown."""

from collections.abc import Sequence

import mlx.core as mx

from specmlx.cache.conversation import Count, Draft, Held, Observable
from specmlx.decoding.policy import MixedPolicy, RoundPolicy
from specmlx.drafters.proposal import Context, Drafter, Joinable, Proposal

# Passes without a proposal, and rows of them, that are kept until the drafter is shown them all at once.
_PASSES, _ROWS = 64, 1024


def observe(held: Held, drafter: Drafter | None, later: bool = False) -> None:
    """Let the drafter see the committed rows that it has not seen; one that is new to the conversation starts here.

    With `later`, a few rows may wait until it is to propose.
    """
    # Taken out meanwhile: a context that is left half-way is not used again.
    rows, draft = held.unobserved, held.draft
    held.unobserved = held.draft = None
    if drafter is None:
        return
    lengths, count = held.lengths, held.count
    end = sum(lengths)
    missing = end - draft.known if draft is not None and draft.drafter is drafter else -1
    if missing == 0 or (missing == _total(count) and (draft.ahead or rows is not None)):
        if draft.ahead:
            draft.context.settle(count if missing else 0)
            draft = Draft(drafter, draft.context, end)
        elif missing:
            draft = draft._replace(waiting=(*draft.waiting, (rows, count)))
    else:
        # It is new, or missed rows by an interrupt, and would be wrong from then on.
        draft = joined([Draft(drafter, drafter.new_context(1, start=length), length) for length in lengths])
    if not later or len(draft.waiting) >= _PASSES or draft.known - draft.end >= _ROWS:
        draft = _caught_up(draft)
    held.draft = draft


def observe_ahead(held: Held, rows: Observable, count: int | mx.array) -> None:
    """Let the drafter see the first `count` rows of the open pass (an int, or int32 `[B]`, which is not read).

    The next `observe` settles how many of them stayed.
    """
    draft, held.draft = held.draft, None
    draft = _caught_up(draft)
    _observe(draft.drafter, draft.context, rows.tokens, rows.features, count)
    held.draft = draft._replace(ahead=True)


def propose(
    drafter: Drafter, context: Context, anchor: mx.array, num_draft_tokens: int, policy: RoundPolicy | MixedPolicy
) -> Proposal:
    """A drafter's proposal after each sequence's anchor `[B]` int32."""
    if not isinstance(context, Separate):
        return drafter.propose(context, anchor, num_draft_tokens, policy)
    found = []
    for i, each in enumerate(context.contexts):
        alone = policy.alone(i)
        found.append(drafter.propose(each, anchor[i : i + 1], num_draft_tokens, alone))
        if alone.failures:
            policy.failures[i] = alone.failures[0]
    most = max(one.tokens.shape[1] for one in found)
    # A short proposal is made longer with tokens that the target may or may not agree with.
    tokens = [mx.pad(one.tokens, [(0, 0), (0, most - one.tokens.shape[1])]) for one in found]
    if all(one.q is None for one in found):
        return Proposal(mx.concatenate(tokens))
    vocab = next(one.q.shape[-1] for one in found if one.q is not None)
    q = []
    for one, padded in zip(found, tokens, strict=True):
        # What was not sampled is the only draw from its distribution.
        sampled = [] if one.q is None else [one.q]
        certain = padded[:, one.q.shape[1] if sampled else 0 :, None] == mx.arange(vocab)
        q.append(mx.concatenate([*sampled, certain.astype(mx.float32)], axis=1))
    return Proposal(mx.concatenate(tokens), mx.concatenate(q))


class Separate:
    """The contexts of a drafter that can't have several sequences in one; it is asked for each in turn."""

    def __init__(self, contexts: Sequence[Context]):
        self.contexts = list(contexts)

    def settle(self, count: int | Sequence[int]) -> None:
        """See `drafters.proposal.Context`."""
        counts = [count] * len(self.contexts) if isinstance(count, int) else count
        for context, own in zip(self.contexts, counts, strict=True):
            context.settle(own)

    def arrays(self) -> list[mx.array]:
        return [x for context in self.contexts for x in context.arrays()]


def joined(drafts: Sequence[Draft]) -> Draft:
    """The drafts of several conversations, which are all caught up, as one; of one, its own."""
    if len(drafts) == 1:
        return drafts[0]
    drafter, contexts = drafts[0].drafter, []
    for draft in drafts:
        contexts += draft.context.contexts if isinstance(draft.context, Separate) else [draft.context]
    first, *others = contexts
    context = first.joined(others) if isinstance(first, Joinable) else Separate(contexts)
    return Draft(drafter, context, sum(draft.end for draft in drafts))


def taken(draft: Draft, indices: Sequence[int], rows: int) -> Draft:
    """The draft of some of several conversations; `rows`: the rows of these."""
    context = draft.context
    if not isinstance(context, Separate):
        context = context.lanes(indices)
    elif len(indices) > 1:
        context = Separate([context.contexts[i] for i in indices])
    else:
        context = context.contexts[indices[0]]
    return Draft(draft.drafter, context, rows)


def _observe(
    drafter: Drafter, context: Context, tokens: mx.array, features: mx.array | None, count: Count | mx.array
) -> None:
    if not isinstance(context, Separate):
        count = mx.array(count, dtype=mx.int32) if isinstance(count, list) else count
        drafter.observe(context, tokens, features, count)
        return
    for i, each in enumerate(context.contexts):
        own = count[i] if isinstance(count, list) else count if isinstance(count, int) else count[i : i + 1]
        drafter.observe(each, tokens[i : i + 1], None if features is None else features[i : i + 1], own)


def _caught_up(draft: Draft) -> Draft:
    if not draft.waiting:
        return draft
    waiting = draft.waiting
    if len(waiting) > 1 and isinstance(waiting[0][1], int):
        # Shown at once, what waited is one pass for the drafter.
        tokens = mx.concatenate([rows.tokens[:, :count] for rows, count in waiting], axis=1)
        features = None
        if waiting[0][0].features is not None:
            features = mx.concatenate([rows.features[:, :count] for rows, count in waiting], axis=1)
        waiting = [(Observable(tokens, features), tokens.shape[1])]
    for rows, count in waiting:
        _observe(draft.drafter, draft.context, *rows, count)
    return Draft(draft.drafter, draft.context, draft.known)


def _total(count: Count) -> int:
    return count if isinstance(count, int) else sum(count)
