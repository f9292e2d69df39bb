"""What makes drafting cheaper, or look less far back: settings of one drafter, applied once it is loaded."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from specmlx.drafters.base import HeadedDrafter
from specmlx.drafters.block_drafter import BlockDrafter
from specmlx.drafters.dspark import DSpark
from specmlx.drafters.small_lm import SmallLM
from specmlx.formats.header import read_json
from specmlx.formats.scaled_linear import BlockScaledLinear, ScaledLinear
from specmlx.formats.values import integer
from specmlx.kernels.dispatch import on_metal

FREQUENCIES = "token_frequencies.json"
# mode, bits and group size by name.
QUANTIZATIONS = {"8": ("affine", 8, 64), "4": ("affine", 4, 64), "nvfp4": ("nvfp4", 4, 16), "mxfp4": ("mxfp4", 4, 32)}
NONE = "none"
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "fc")
_HEADS = ("markov_head", "confidence_head", "candidate_selector")
_USES = {
    "draft_window": BlockDrafter,
    "draft_quantize": HeadedDrafter | SmallLM,
    "draft_vocab": HeadedDrafter,
    "draft_markov_top_k": DSpark,
}


def default_quantization(model: nn.Module, metal: bool) -> str:
    """What a drafter's projections become where nothing is asked for: 4 bits on Metal unless some are packed."""
    packed = (nn.QuantizedLinear, ScaledLinear, BlockScaledLinear)
    stored = any(isinstance(module, packed) for _, module in model.named_modules())
    return "4" if metal and not stored else NONE


@dataclass(frozen=True)
class DraftSettings:
    """Settings of a drafter; None leaves it as it is. All are lossless: the target checks what is drafted.

    draft_window: tokens that a block drafter looks back at, at most.
    draft_quantize: "8", "4", "nvfp4", "mxfp4" or "none"; projections of attention, MLP and fc only. By default 4 bits
        on Metal for a drafter that is not quantized yet, else none.
    draft_vocab: rows of the drafter's head, for the most frequent tokens.
    draft_vocab_file: a JSON list of token ids, the most frequent first; by default token_frequencies.json beside the
        drafter or the target.
    draft_markov_top_k: how many of a slot's tokens get DSpark's Markov bias; the others are not drafted.
    """

    draft_window: int | None = None
    draft_quantize: str | None = None
    draft_vocab: int | None = None
    draft_vocab_file: str | None = None
    draft_markov_top_k: int | None = None

    def __post_init__(self):
        for name in ("draft_window", "draft_vocab", "draft_markov_top_k"):
            if (value := getattr(self, name)) is not None:
                integer(name, value, 1)
        if self.draft_quantize not in (None, NONE, *QUANTIZATIONS):
            raise ValueError(
                f"draft_quantize is {self.draft_quantize!r}: it must be one of {', '.join(QUANTIZATIONS)}, {NONE}"
            )
        if self.draft_vocab_file and self.draft_vocab is None:
            raise ValueError(f"draft_vocab_file is {self.draft_vocab_file}, but draft_vocab says no number of tokens")

    def apply(self, drafter: Any, directories: Sequence[Path] = ()) -> None:
        """Change a drafter in place; `directories` are where a file of frequencies may be.

        Raises ValueError, one line, for what the drafter has no use for, and before anything of it has changed.
        """
        for name, kinds in _USES.items():
            if (value := getattr(self, name)) not in (None, NONE) and not isinstance(drafter, kinds):
                user = f"a {type(drafter).__name__} drafter has no use for it"
                user = "there is no drafter" if drafter is None else user
                raise ValueError(f"{name} is {value} but {user}: leave it out")
        ids = None if self.draft_vocab is None else self._shortlist(drafter.vocab_size, directories)
        if self.draft_window is not None:
            drafter.draft_window = self.draft_window
        if self.draft_markov_top_k is not None:
            drafter.markov_top_k = min(self.draft_markov_top_k, drafter.config.draft_vocab_size)
        if ids is not None:
            drafter.shorten(ids)
        if isinstance(drafter, _USES["draft_quantize"]):
            self._quantize(drafter.model)

    def _shortlist(self, vocab_size: int, directories: Sequence[Path]) -> mx.array:
        files = [Path(self.draft_vocab_file)] if self.draft_vocab_file else [d / FREQUENCIES for d in directories]
        file = next((file for file in files if file.exists()), None)
        if file is None:
            where = " nor ".join(str(file) for file in files) or FREQUENCIES
            raise ValueError(f"draft_vocab is {self.draft_vocab} but there is no {where}: pass draft_vocab_file")
        ids = read_json(file)
        if not isinstance(ids, list) or not all(isinstance(i, int) and 0 <= i < vocab_size for i in ids):
            raise ValueError(f"{file} is no list of token ids below {vocab_size}, the most frequent first")
        if len(set(ids)) != len(ids) or len(ids) < self.draft_vocab:
            raise ValueError(f"draft_vocab is {self.draft_vocab} but {file} has {len(set(ids))} different tokens")
        return mx.array(ids[: self.draft_vocab], dtype=mx.int32)

    def _quantize(self, model: nn.Module) -> None:
        if (name := self.draft_quantize or default_quantization(model, on_metal())) == NONE:
            return
        mode, bits, group_size = QUANTIZATIONS[name]

        def chosen(path: str, module: nn.Module) -> bool:
            parts = path.split(".")
            known = parts[-1] in _PROJECTIONS and not any(head in parts for head in _HEADS)
            return known and type(module) is nn.Linear and module.weight.shape[-1] % group_size == 0

        if self.draft_quantize and not any(chosen(path, module) for path, module in model.named_modules()):
            what = f"no dense projection in groups of {group_size}"
            raise ValueError(f"draft_quantize is {name} but the drafter has {what}: leave it out")
        nn.quantize(model, group_size, bits, mode=mode, class_predicate=chosen)
        mx.eval(model.parameters())
