"""A small language model as a drafter: any mlx-lm model with the target's tokens and caches that can be trimmed."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache

from specmlx.cache.mlx_lm import in_order
from specmlx.drafters.base import MAX_WIDTH, BaseDrafter, Drawn, one_by_one
from specmlx.drafters.pairing import lm_reasons
from specmlx.drafters.proposal import DraftPolicy, Proposal
from specmlx.formats.checkpoint import read_config
from specmlx.formats.header import read_small
from specmlx.targets.checkpoint import load_target

_CHUNK = 512
# Rows that are taken back at once, at most: drafts that were rejected, and rows of a round that was dropped.
_SPARE = 64


class LMContext:
    """Ids that were observed, and the model's caches with the ids of the rows that they hold, drafts behind them."""

    def __init__(self, model: nn.Module):
        self.ids: list[int] = []
        self.model = model
        self.caches = _caches(model)
        self.rows: list[int] = []
        self.drafts: mx.array | None = None
        # How many ids there were before the last observation.
        self.before = 0

    def settle(self, count: int | Sequence[int]) -> None:
        """See `drafters.proposal.Context`."""
        del self.ids[self.before + (count if isinstance(count, int) else count[0]) :]

    def catch_up(self) -> None:
        """Trim the caches to the rows that are the ids' own, and run the model on the ids that have none yet."""
        if self.drafts is not None:
            self.rows += self.drafts.tolist()
            self.drafts = None
        same = len(commonprefix([self.rows, self.ids]))
        if (gone := len(self.rows) - same) > _SPARE:
            self.caches, same = _caches(self.model), 0
        else:
            trim_prompt_cache(self.caches, gone)
        self.rows = self.ids[:same]
        for start in range(same, end := len(self.ids), _CHUNK):
            part = self.ids[start : start + _CHUNK]
            self.model(mx.array([part], dtype=mx.int32), cache=self.caches)
            self.rows += part
            if end - same > _CHUNK:
                mx.eval(self.arrays())

    def arrays(self) -> list[mx.array]:
        drafts = [] if self.drafts is None else [self.drafts]
        return drafts + [x for cache in self.caches if not cache.empty() for x in cache.state if x is not None]


@dataclass(eq=False)
class SmallLM(BaseDrafter):
    """A language model paired with a target of the same tokens. One conversation at a time.

    Its caches' lengths are the host's, so observing waits for counts that are still on the device: with lookahead, the
    next round is issued once this one is done. `vocab_size` is the target's. Raises ValueError for a model whose caches
    can't be trimmed.
    """

    model: nn.Module
    vocab_size: int
    max_width: int = MAX_WIDTH

    def __post_init__(self):
        if not can_trim_prompt_cache(_caches(self.model)):
            raise ValueError(f"a {type(self.model).__module__} has caches that can't be trimmed: it can't be a drafter")

    def new_context(self, batch: int = 1, start: int = 0) -> LMContext:
        """See `Drafter.new_context`. Raises ValueError for more than one sequence."""
        if batch != 1:
            raise ValueError(f"a language model drafts for one conversation at a time, not {batch}")
        return LMContext(self.model)

    def observe(self, context: LMContext, tokens: mx.array, features: mx.array | None, count: int | mx.array) -> None:
        """See `Drafter.observe`; reads `count` if it is on the device. Raises ValueError for one outside 0..n."""
        context.before = len(context.ids)
        super().observe(context, tokens, features, count if isinstance(count, int) else count.item())

    def _observe(self, context: LMContext, tokens: mx.array, features: None, count: int) -> None:
        context.ids += tokens[0].tolist()
        if len(context.ids) - len(context.rows) > _CHUNK:
            context.catch_up()

    def _propose(self, context: LMContext, anchor: mx.array, slots: int, policy: DraftPolicy) -> Proposal:
        context.catch_up()
        fed = []

        def draw(slot: int, token: mx.array) -> Drawn:
            fed.append(token[0])
            logits = self.model(token, cache=context.caches)[..., : self.vocab_size]
            # The tables of two sizes of a family may be padded differently.
            if missing := self.vocab_size - logits.shape[-1]:
                logits = mx.pad(logits, [(0, 0), (0, 0), (0, missing)], constant_values=-mx.inf)
            return policy.draft(logits, slot)

        tokens, q = one_by_one(anchor, slots, draw)
        context.drafts = mx.concatenate(fed)
        return Proposal(tokens, q)


def _caches(model: nn.Module) -> list:
    """Empty caches; windows in the order of their rows, since mlx-lm's can't be trimmed once they are full."""
    return [in_order(cache, _SPARE) for cache in make_prompt_cache(model)]


def load_small_lm(path: Path, target: Any, dtype: mx.Dtype | None = None) -> SmallLM:
    """The language model in a directory as a drafter of `target`, which has `vocab_size` and `directory`.

    Raises ValueError, one line, where their tokens are not the same, for recurrent models, and for bad files.
    """
    if reasons := lm_reasons(read_config(path)):
        raise ValueError(f"the drafter in {path} can't serve this target: {'; '.join(reasons)}")
    what = f"the language model in {path} has"
    tokens, wanted = _tokens(path), None if target.directory is None else _tokens(target.directory)
    if tokens and wanted and tokens != wanted:
        other = next(token for token in {**tokens, **wanted} if tokens.get(token) != wanted.get(token))
        there, here = tokens.get(other), wanted.get(other)
        raise ValueError(f"{what} other tokens than the target: {other!r} is {there} there, {here} here")
    model, _ = load_target(path, dtype=dtype)
    if not (tokens and wanted) and model.vocab_size != target.vocab_size:
        sizes = f"{model.vocab_size} tokens, the target {target.vocab_size}"
        raise ValueError(f"{what} {sizes}, and there is no tokenizer.json that tells whether they are the same")
    return SmallLM(model.lm, target.vocab_size)


def _tokens(directory: Path) -> dict[str, int] | None:
    """The ids of all tokens, from tokenizer.json; None where there is none or it has no such table."""
    if not (file := directory / "tokenizer.json").exists():
        return None
    text = read_small(file)
    try:
        tokenizer = json.loads(text.decode())
        added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}
        return {**tokenizer["model"]["vocab"], **added}
    except (ValueError, KeyError, TypeError):
        return None
