"""Whether a model's logits come from a head of its own or from its embeddings: the files say it, not config.json."""

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from specmlx.targets.any_lm import EMBEDDINGS
from specmlx.targets.config import MODEL_TYPES
from specmlx.targets.weights import OTHER_MODELS

FLAG = "tie_word_embeddings"


def settle_head(config: dict[str, Any], weights: dict[str, mx.array], path: Path) -> None:
    """Let `tie_word_embeddings` say what the weights are, as transformers' `tie_weights` does; both change in place.

    A head whose values differ from the embeddings' is kept, with a warning where the config ties them; one of equal
    values is dropped. Embeddings that are missing are the tied head. Raises ValueError in one line for a hybrid that
    has no head and ties none.
    """
    head, table = _parts(weights, ["lm_head"]), _parts(weights, EMBEDDINGS)
    parts = [config]
    if isinstance(config.get("text_config"), dict):
        parts.append(dict(config["text_config"]))
        config["text_config"] = parts[1]
    flags = [part[FLAG] for part in parts if part.get(FLAG) is not None]
    if not head:
        if not any(flags) and config["model_type"] in MODEL_TYPES:
            raise ValueError(f"{path} has no lm_head: download it again, or set {FLAG} if the embeddings are its head")
        tied = any(flags)
    elif not table:
        tied = any(flags)
        for name in list(head.values()) if tied else ():
            weights[name.replace("lm_head.", "model.embed_tokens.")] = weights.pop(name)
    else:
        tied = (any(flags) or not flags) and _equal(weights, head, table)
        if tied:
            for name in head.values():
                del weights[name]
        elif any(flags):
            warnings.warn(f"{path}: {FLAG} is true, but lm_head isn't the embeddings: lm_head is kept", stacklevel=3)
    if flags or head:
        for part in parts:
            part[FLAG] = tied


def _parts(weights: dict[str, mx.array], modules: Sequence[str]) -> dict[str, str]:
    """The names of a module's tensors by their last part; of the text model, and no layer's."""
    names = [re.fullmatch(rf"((?:.*\.)?)(?:{'|'.join(modules)})\.(\w+)", name) for name in weights]
    others = {*OTHER_MODELS, "layers"}
    return {match[2]: match[0] for match in names if match and not others & set(match[1].split("."))}


def _equal(weights: dict[str, mx.array], head: dict[str, str], table: dict[str, str]) -> bool:
    if head.keys() != table.keys():
        return False
    pairs = [(weights[head[part]], weights[table[part]]) for part in head]
    return all(a.dtype == b.dtype and a.shape == b.shape and mx.array_equal(a, b).item() for a, b in pairs)
