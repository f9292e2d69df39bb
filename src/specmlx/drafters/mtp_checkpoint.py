"""An MTP head from the target's own repository (`mtp.*`), or from one of its own (mlx-vlm's split)."""

import re
import sys
from collections.abc import Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from specmlx.drafters.mtp import MTP, MTPHead
from specmlx.drafters.pairing import is_split_mtp, mtp_reasons
from specmlx.drafters.weights import load_weights
from specmlx.formats.checkpoint import read_config, read_weights, shards_of
from specmlx.formats.scaled import is_scaled, read_scaled
from specmlx.targets.config import HybridConfig
from specmlx.targets.gguf import gguf_files, has_head, head_weights, read_parts
from specmlx.targets.gguf_config import config_of
from specmlx.targets.hybrid import Model
from specmlx.targets.weights import stacked_experts

TOKENS = 64
# In the form that the models with such heads are trained on.
_QUESTION = (
    "<|im_start|>user\nPlease write a class Trip in Python that has map and lamp and picture.<|im_end|>\n"
    "<|im_start|>assistant\n"
)
_SCALES = (0.125, 0.25, 0.5, 1.0)
# Of the text's tokens, how many a head has to guess for its norms to be told.
_LEAST = 0.125
_PREFIX = re.compile(r"(?:model\.|language_model\.)*mtp\.")


def load_mtp(path: str | Path, target: Model, dtype: mx.Dtype | None = None) -> MTP:
    """The MTP head in a directory or a GGUF file, paired with its target; `dtype` casts its floating-point weights.

    Published files hold norms as w - 1. Converted ones hold w, w - 1, or both, and no file says so but ours: norms are
    then what the target's own text shows (see `settle_norms`), which stderr is told. Raises ValueError, one line, for a
    directory without a head, a head that doesn't fit, and missing, extra or misshapen tensors.
    """
    path = Path(path)
    parts = read_parts(files) if (files := gguf_files(path)) else []
    config = config_of(parts) if files else read_config(path)
    if files and not has_head(parts):
        raise ValueError(f"{files[0]} has no MTP head (no nextn.* tensors): take a file that was converted with it")
    if reasons := mtp_reasons(config, target.config):
        raise ValueError(f"the MTP head in {files[0] if files else path} can't serve this target: {'; '.join(reasons)}")
    if files:
        # Its norms are w: llama.cpp's converter writes them so. All is computed in float32, unless it is cast.
        weights = head_weights(parts, config, MTPHead(HybridConfig.from_dict(config)))
        wide = {name: w.astype(mx.float32) if mx.issubdtype(w.dtype, mx.floating) else w for name, w in weights.items()}
        return build_mtp(wide, config, target, files[0], dtype)
    weights = read_weights(path)
    named = {_PREFIX.sub("", name, count=1): w for name, w in weights.items() if _PREFIX.match(name)}
    if not named and not is_split_mtp(config):
        hint = "conversions often drop the MTP head; take the publisher's own files or a split repository"
        raise ValueError(f"{path} has no mtp.* tensors: {hint}")
    lowered, doubtful = (set(), set()) if config.get("mtp_norms") == "w" else _norms(path, weights, bool(named))
    # Cast first: 1 + w has fewer digits than w.
    weights = {name: w.astype(dtype or w.dtype) + 1 if name in lowered else w for name, w in (named or weights).items()}
    drafter = build_mtp(weights, config, target, path, dtype)
    if doubtful:
        print(f"the MTP head in {path}: {settle_norms(drafter, target, doubtful)}", file=sys.stderr)
    return drafter


def _norms(path: Path, weights: dict[str, mx.array], prefixed: bool) -> tuple[set[str], set[str]]:
    """The head's norms that are w - 1 for certain, and those that may be, by their names without the prefix.

    Files that PyTorch wrote, and those beside convs in its layout, are the publishers'.
    """
    raw = any(name.endswith("conv1d.weight") and w.shape[-1] != 1 for name, w in weights.items())
    lowered, doubtful = set(), set()
    for file, entries in shards_of(path).items():
        if norms := [name for name in entries if "norm" in name and bool(_PREFIX.match(name)) == prefixed]:
            written = mx.load(str(file), format="safetensors", return_metadata=True)[1].get("format")
            certain = prefixed and (written == "pt" or (raw and written != "mlx"))
            (lowered if certain else doubtful).update(_PREFIX.sub("", name, count=1) for name in norms)
    return lowered, doubtful


def build_mtp(
    weights: dict[str, mx.array], config: dict[str, Any], target: Model, where: Path, dtype: mx.Dtype | None = None
) -> MTP:
    """A head of `MTPHead`'s tensors by its names (experts and codes as publishers have them), norms as w.

    Raises ValueError, one line that names `where`, for missing, extra or misshapen tensors.
    """
    if is_scaled(weights):
        weights = read_scaled(weights, config)
    head = MTPHead(HybridConfig.from_dict(config))
    load_weights(head, stacked_experts(weights), where, dtype)
    return MTP(head, target)


def settle_norms(drafter: MTP, target: Model, doubtful: Iterable[str]) -> str:
    """Add 1 to those of the head's `doubtful` norms with which it guesses the target's greedy text best.

    Returns in one line what was chosen; nothing is where the head guesses hardly a token either way.
    """
    text, doubtful = _greedy(target, drafter.tap_ids), set(doubtful)
    stored = {name: w for name, w in tree_flatten(drafter.model.parameters()) if name in doubtful}

    def apply(raised: frozenset[str]) -> None:
        norms = [(name, w + 1 if name in raised else w) for name, w in stored.items()]
        drafter.model.load_weights(norms, strict=False)

    @cache
    def score(raised: frozenset[str]) -> tuple[float, float]:
        apply(raised)
        return _score(drafter, text)

    every = frozenset(stored)
    layer = frozenset(name for name in stored if name.startswith("layers."))
    final = every & {"norm.weight"}
    # What converters have been seen to do; from the best of them on, norm by norm.
    best = max([frozenset(), every, layer, every - layer, final, every - final], key=score)
    while (better := max((best ^ {name} for name in stored), key=score)) and score(better) > score(best):
        best = better
    hits = score(best)[1]
    best = best if hits >= _LEAST else frozenset()
    apply(best)
    names = sorted(name.removesuffix(".weight").rpartition(".")[2] for name in best)
    chosen = "w" if not best else "w - 1" if best == every else f"w, but w - 1 in {', '.join(names)}"
    found = f"{round(hits * TOKENS)} of {TOKENS} tokens guessed"
    return f"norms read as {chosen}" + (f" ({found})" if hits >= _LEAST else f", by their names: {found} either way")


def _greedy(target: Model, tap_ids: Sequence[int]) -> tuple[mx.array, mx.array]:
    """Ids `[1, n + TOKENS]` of a prompt of n and the target's answer, and the last layer's rows of all but the last."""
    states, rows, features = target.new_states(), mx.array([_prompt(target)], dtype=mx.int32), []
    ids = [rows]
    for _ in range(TOKENS):
        done = target.verify(states, rows, tap_ids)
        token = mx.argmax(done.logits[:, -1:], axis=-1).astype(mx.int32)
        states.evaluate()
        mx.eval(token, done.features)
        states.commit(rows.shape[1])
        features.append(done.features)
        ids.append(token)
        rows = token
    return mx.concatenate(ids, axis=1), mx.concatenate(features, axis=1)


def _prompt(target: Model) -> list[int]:
    from tokenizers import Tokenizer

    try:
        ids = Tokenizer.from_file(str(Path(target.directory or "") / "tokenizer.json")).encode(_QUESTION).ids
    # tokenizers raises a bare Exception.
    except Exception:
        ids = []
    return ids if ids and max(ids) < target.config.vocab_size else list(range(16, 32))


def _score(drafter: MTP, text: tuple[mx.array, mx.array]) -> tuple[float, float]:
    """How well the head guesses the answer, each token from those before it; and the share that it guesses right.

    Norms that are off by 1 mostly scale logits, which argmax doesn't see, so the likelihood is that of the best scale.
    """
    ids, features = text
    head, layer = drafter.model, drafter.model.layers[0]
    hidden = drafter.target.model.norm(features).astype(head.norm.weight.dtype)
    embeddings = drafter.target.embed_tokens(ids[:, 1:-1]).astype(hidden.dtype)
    mixer = partial(layer.self_attn, kv=None, start=0, length=0, mask="causal")
    y, _ = layer(head.rows(embeddings, hidden[:, :-1]), mixer)
    answer = ids[0, 1 - TOKENS :, None]
    logits = drafter.logits(head.norm(y[0, 1 - TOKENS :])).astype(mx.float32)
    hits = (mx.argmax(logits, axis=-1, keepdims=True) == answer).mean()
    losses = [nn.losses.cross_entropy(logits * scale, answer[:, 0], reduction="mean") for scale in _SCALES]
    return (hits - 0.5 * mx.min(mx.stack(losses))).item(), hits.item()
