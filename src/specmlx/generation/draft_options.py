"""A request's drafter, and how many tokens it drafts."""

import contextlib
import json
import os
import platform
from collections.abc import Sequence as Ids
from functools import partial
from hashlib import blake2b
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from specmlx.cache.conversation import Conversation
from specmlx.decoding.draft_length import FULL, AutoLength, Measurement
from specmlx.decoding.loop import Batch, Sequence
from specmlx.decoding.policy import Policy
from specmlx.decoding.prefill import prefill
from specmlx.decoding.round import OnProposal
from specmlx.drafters.block_drafter import BlockDrafter
from specmlx.drafters.mtp import MTP
from specmlx.drafters.proposal import Drafter, Fingerprinted
from specmlx.formats.cache import cache_directory
from specmlx.formats.values import integer
from specmlx.kernels.choice.table import power_mode, this_chip, this_version
from specmlx.kernels.dispatch import metal_factory, to_stderr
from specmlx.loading.load import AUTO, load_drafter
from specmlx.parallel.broadcast import SharedLength, from_first
from specmlx.targets.any_lm import AnyLM
from specmlx.targets.config import FULL as ATTENTION
from specmlx.targets.hybrid import Model

# How many of a prompt's last tokens conversations begin with in which rounds are measured.
_PROMPT = 128


def choose_drafter(
    model: Model | AnyLM, draft_model: Any, num_draft_tokens: int | str | None
) -> tuple[Drafter | None, str | None]:
    """The drafter to use, or None, and what there is to say of that."""
    reason = None
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
    if isinstance(drafter, BlockDrafter | MTP) and drafter.target.embedding is not model.embedding:
        raise ValueError("draft_model is paired with another target: load it with specmlx.load_drafter(path, model)")
    if drafter is not None and num_draft_tokens == 0:
        return None, "num_draft_tokens is 0"
    if drafter is not None and drafter is model.fallback:
        return drafter, f"prompt lookup drafts: {model.no_draft_reason}"
    return drafter, model.kernel_note if drafter else reason


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


def auto_length(model: Any, drafter: Drafter, *apart: str) -> AutoLength:
    """What chooses the number of drafted tokens for each round; what rounds take is kept `apart`."""
    # A drafter of the user's is known by its name: if it has changed, rounds contradict what was kept.
    known = isinstance(drafter, Fingerprinted)
    name = drafter.fingerprint if known else f"{type(drafter).__module__}.{type(drafter).__qualname__}"
    # Rounds take as long as the kernels that were chosen for them have it.
    pair = model.fingerprint, name, drafter.max_width, model.kernel_note, metal_factory() is not None, *apart
    machine = platform.node(), this_chip(), str(mx.default_device()), power_mode(), this_version()
    digest = blake2b(json.dumps([*pair, *machine]).encode(), digest_size=16)
    file = cache_directory() / "draft_length" / f"{digest.hexdigest()}.json"
    group = model.sharding_group
    return AutoLength(
        drafter.max_width, file=file if group is None or group.rank() == 0 else None, row_share=_row_share(model)
    )


def _row_share(model: Model | AnyLM) -> float:
    """Bytes of a row of keys and values, as a share of the weights; 0 where it isn't known."""
    if isinstance(model, AnyLM):
        return 0.0
    row = 2 * model.config.layer_types.count(ATTENTION) * model.kv_heads * model.config.head_dim * model.dtype.size
    return row / sum(x.nbytes for _, x in tree_flatten(model.parameters()))


def measure(
    model: Model | AnyLM,
    drafter: Drafter,
    length: AutoLength,
    prompt: Ids[int],
    lanes: int = 1,
    lookahead: bool = True,
    on_proposal: OnProposal | None = None,
) -> None:
    """Measure what rounds take, if that is due: those of conversations that begin as the prompt ends, thrown away.

    It is off where $SPECMLX_CALIBRATE is 0. What goes wrong here goes wrong in the answer, which says so.
    """
    group, due = model.sharding_group, length.curve.due and os.environ.get("SPECMLX_CALIBRATE") != "0"
    if group is not None:
        due = from_first(group, mx.array(due, dtype=mx.int32)).item()
    if not due:
        return
    if group is None or group.rank() == 0:
        together = f", {lanes} requests together" if lanes > 1 else ""
        to_stderr(f"measuring what rounds take with {type(drafter).__name__} on this machine{together} (5 s at most)")
    measurement = Measurement(length)
    chosen = measurement if group is None else SharedLength(measurement, group)
    decide = None if group is None else partial(from_first, group)
    batch = Batch(model, drafter, chosen, lookahead=lookahead, decide=decide, on_proposal=on_proposal)
    with contextlib.suppress(Exception):
        prompt = list(prompt[-max(_PROMPT // lanes, 8) :])
        for _ in range(lanes):
            conversation = Conversation(model.new_states())
            for _ in prefill(model, conversation, prompt, drafter, _PROMPT):
                pass
            batch.join([Sequence(conversation, Policy(), list(prompt))])
        while not chosen.done:
            for _ in batch.round():
                pass
    length.context = 0
