"""Losses and their gradients against torch's, through the publishers' own code (goldens/make_training_goldens.py)."""

import json
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from specmlx.drafters.checkpoint import build
from specmlx.drafters.config import DrafterConfig
from specmlx.drafters.mtp import MTP, MTPHead
from specmlx.targets.config import HybridConfig
from specmlx.training.losses import DraftLoss, draft_loss, mtp_loss

GOLDENS = Path(__file__).parents[1] / "goldens" / "training"
FILE = json.loads((GOLDENS / "losses.json").read_text())


class Given:
    """A target that makes of the goldens' texts what the goldens say."""

    def __init__(self, arrays: dict[str, mx.array]):
        self.arrays = arrays
        self.config = HybridConfig.from_dict(FILE["configs"]["mtp"])
        self.head = nn.Linear(*reversed(arrays["head"].shape), bias=False)
        self.head.weight = arrays["head"]
        self.model = SimpleNamespace(norm=nn.RMSNorm(self.config.hidden_size))

    def features(self, tokens):
        assert mx.array_equal(tokens, self.arrays["tokens"][:, :-1])
        return self.arrays["hidden"], None

    def scored(self, tokens, tap_ids):
        return self.lm_head(self.features(tokens)[0]), self.arrays["features"]

    def embed_tokens(self, ids):
        return self.arrays["embed"][ids]

    def lm_head(self, h):
        return self.head(h)


def case(name: str):
    """A drafter with the golden weights, its loss, and the golden loss."""
    entry, arrays = FILE["cases"][name], mx.load(str(GOLDENS / "inputs.safetensors"))
    kind, config, target = entry["drafter"], FILE["configs"][entry["drafter"]], Given(arrays)
    weights = [(k.removeprefix(f"{kind}/"), x) for k, x in arrays.items() if k.startswith(f"{kind}/")]
    terms = DraftLoss(**entry["terms"])
    if kind == "mtp":
        drafter = MTP(MTPHead(HybridConfig.from_dict(config)), target, 4)
        # transformers' norms hold w for a factor of 1 + w.
        weights = [(k.removeprefix("mtp."), x + 1 if "norm" in k else x) for k, x in weights]
        loss = mtp_loss(drafter, target, terms)
    else:
        drafter = build(DrafterConfig.from_dict(config), target)
        loss = draft_loss(drafter, target, terms)
    drafter.model.load_weights(weights)
    return drafter, loss, entry["loss"], (arrays["tokens"], arrays["weights"], arrays["anchors"])


@pytest.mark.parametrize("name", FILE["cases"])
def test_the_loss_and_every_gradient_are_torchs(name):
    drafter, loss, expected, batch = case(name)
    (value, _), found = nn.value_and_grad(drafter.model, loss)(drafter.model, *batch)
    assert value.item() == pytest.approx(expected, rel=1e-5)
    golden = mx.load(str(GOLDENS / "gradients.safetensors"))
    prefix = f"{name}/mtp." if name == "mtp" else f"{name}/"
    golden = {k.removeprefix(prefix): x for k, x in golden.items() if k.startswith(prefix)}
    largest = max(mx.abs(x).max().item() for x in golden.values())
    for tensor, gradient in tree_flatten(found):
        other = golden.pop(tensor, mx.zeros_like(gradient))
        scale = max(mx.abs(other).max().item(), 1e-3 * largest)
        assert mx.abs(gradient - other).max().item() <= 1e-5 * scale, tensor
    assert golden == {}
