"""Whether an MTP head's norms are stored as w or w - 1, where its files don't tell: by its guesses of a text."""

from collections.abc import Iterable, Sequence
from functools import cache, partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from specmlx.drafters.mtp import MTP
from specmlx.targets.hybrid import Model

TOKENS = 64
# In the form that the models with such heads are trained on.
_QUESTION = "<|im_start|>user\nPlease write a class Trip in Python that has map and lamp and picture.<|im_end|>\n"
_QUESTION += "<|im_start|>assistant\n"
# Of the text's tokens, how many a head has to guess for its norms to be told.
_LEAST = 0.125


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
    from mlx_lm.generate import generate_step
    from tokenizers import Tokenizer

    try:
        prompt = Tokenizer.from_file(str(Path(target.directory or "") / "tokenizer.json")).encode(_QUESTION).ids
    # tokenizers raises a bare Exception.
    except Exception:
        prompt = []
    prompt = prompt if prompt and max(prompt) < target.config.vocab_size else list(range(16, 32))
    answer = [token for token, _ in generate_step(mx.array(prompt), target, max_tokens=TOKENS)]
    ids = mx.array([prompt + answer], dtype=mx.int32)
    return ids, target.features(ids[:, :-1], tap_ids)[1]


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
    scaled = (logits * scale for scale in (0.125, 0.25, 0.5, 1.0))
    losses = [nn.losses.cross_entropy(each, answer[:, 0], reduction="mean") for each in scaled]
    return (hits - 0.5 * mx.min(mx.stack(losses))).item(), hits.item()
