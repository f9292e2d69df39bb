"""A request's drafter, and how many tokens it drafts."""

import warnings
from typing import Any

from specmlx.decoding.costs import costs_file
from specmlx.decoding.draft_length import FULL, AutoWidth
from specmlx.decoding.policy import Policy
from specmlx.decoding.stats import Stats
from specmlx.drafters.block_drafter import BlockDrafter
from specmlx.drafters.mtp import MTP
from specmlx.drafters.proposal import Drafter, Fingerprinted
from specmlx.formats.values import integer
from specmlx.loading.load import AUTO, load_drafter
from specmlx.parallel.broadcast import SharedWidths
from specmlx.targets.any_lm import AnyLM
from specmlx.targets.hybrid import Model


def choose_drafter(model: Model | AnyLM, draft_model: Any, num_draft_tokens: int | str | None, policy: Policy):
    """The drafter to use, or none, and the stats that say so."""
    reason = policy.reason
    if isinstance(draft_model, str) and draft_model == AUTO:
        drafter = model.draft_model
        if drafter is None:
            reason = model.no_draft_reason
    elif draft_model is None:
        drafter, reason = None, "draft_model is None"
    else:
        drafter = load_drafter(draft_model, model) if isinstance(draft_model, str) else draft_model
    if drafter is not None and not isinstance(drafter, Drafter):
        kind = type(drafter).__name__
        raise ValueError(f"draft_model is {drafter!r:.40}, of the kind {kind}: load it with specmlx.load_drafter")
    check_width(drafter, num_draft_tokens, reason)
    if drafter is None:
        return None, Stats(mode="plain", reason=reason)
    if isinstance(drafter, BlockDrafter | MTP) and drafter.target.embedding is not model.embedding:
        raise ValueError("draft_model is paired with another target: load it with specmlx.load_drafter(path, model)")
    if num_draft_tokens == 0:
        return None, Stats(mode="plain", reason="num_draft_tokens is 0")
    if drafter is model.fallback:
        reason = policy.reason or f"prompt lookup drafts: {model.no_draft_reason}"
    return drafter, Stats(mode="speculative", reason=reason or model.kernel_note)


def check_width(drafter: Drafter | None, num_draft_tokens: int | str | None, reason: str | None = None) -> None:
    """Raises ValueError where a drafter (or none, for `reason`) proposes fewer tokens than are wanted."""
    if num_draft_tokens is None or isinstance(num_draft_tokens, str):
        return
    if drafter is not None:
        most = drafter.max_width
        allowed = f"an integer from 0 to {most}, which is all that this drafter proposes, {AUTO!r} or {FULL!r}"
        integer("num_draft_tokens", num_draft_tokens, 0, most, allowed)
    elif num_draft_tokens:
        raise ValueError(f"num_draft_tokens is {num_draft_tokens} but there is no drafter: {reason}")


def choose_width(
    model: Any, drafter: Drafter | None, num_draft_tokens: int | str | None, *apart: str
) -> int | AutoWidth | None:
    """What a batch takes for a `num_draft_tokens`; None is the drafter's most. What rounds take is kept `apart`."""
    if drafter is None or num_draft_tokens == FULL:
        return None
    if num_draft_tokens != AUTO and num_draft_tokens is not None:
        return num_draft_tokens
    known = isinstance(drafter, Fingerprinted)
    # Rounds take as long as the kernels that were chosen for them have it.
    notes = [*apart, model.kernel_note] if model.kernel_note else apart
    file = costs_file(model.fingerprint, drafter.fingerprint, *notes) if known else None
    if model.sharding_group is not None:
        return SharedWidths(drafter.max_width, model.sharding_group, file)
    return AutoWidth(drafter.max_width, file=file)


def warn_if_idle(stats: Stats, drafter: Drafter | None, widths: int | AutoWidth | None) -> None:
    """Warn where a drafter that was to propose never did."""
    asked = widths.current if isinstance(widths, AutoWidth) else widths != 0
    if drafter is not None and asked and stats.rounds > 1 and stats.proposed == 0:
        warnings.warn("the drafter was loaded but never proposed a token", stacklevel=4)
