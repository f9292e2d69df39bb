"""What the drafter tests share: a target that is only an embedding and a head, and a greedy policy."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
from rig import tokens

from specmlx.drafters.checkpoint import build
from specmlx.drafters.config import DrafterConfig
from specmlx.drafters.proposal import DraftPolicy

GOLDENS = Path(__file__).parent / "goldens" / "drafters"
VOCAB, HIDDEN, MASK, WINDOW = 96, 64, 90, 12


class StandInTarget:
    """All that a drafter uses of a target."""

    def __init__(self, embedding: mx.array, head: mx.array, layers: int = 6):
        vocab, hidden = embedding.shape
        self.config = SimpleNamespace(hidden_size=hidden, num_hidden_layers=layers, vocab_size=vocab)
        self.embed_tokens = nn.Embedding(vocab, hidden)
        self.embed_tokens.weight = embedding
        self.lm_head = nn.Linear(hidden, vocab, bias=False)
        self.lm_head.weight = head

    @property
    def head(self) -> nn.Linear:
        return self.lm_head


class Greedy(DraftPolicy):
    """Takes the largest logit, slot by slot, and keeps the logits that it was shown."""

    greedy = False

    def __init__(self):
        self.shown: dict[int, mx.array] = {}

    def draft(self, logits: mx.array, slot: int) -> tuple[mx.array, None]:
        for s in range(logits.shape[1]):
            self.shown[slot + s] = logits[:, s]
        return mx.argmax(logits, axis=-1).astype(mx.int32), None

    @property
    def logits(self) -> mx.array:
        return mx.stack([self.shown[slot] for slot in sorted(self.shown)], axis=1)


def golden_config(case: str) -> dict:
    return json.loads((GOLDENS / "configs.json").read_text())[case]


def golden_weights() -> dict[str, mx.array]:
    return mx.load(str(GOLDENS / "weights.safetensors"))


def golden_target() -> StandInTarget:
    weights = golden_weights()
    tables = (weights[name].astype(mx.float32) for name in ("embed_tokens.weight", "lm_head.weight"))
    return StandInTarget(*tables)


def case_weights(case: str) -> dict[str, mx.array]:
    """The tensors that this case's publisher puts in the file."""
    weights = golden_weights()
    plain = weights.pop("confidence_head.plain.weight")
    tables = ("embed_tokens", "lm_head")
    kept = {
        "dflash": (),
        "dflash2": ("conv.", "selector."),
        "dspark": (*tables, "markov_w", "confidence"),
        "dspark_yarn": ("markov_w", "confidence"),
        "dspark_gated": (*tables, "markov_w", "gate_proj", "confidence"),
        "dspark_rnn": (*tables, "markov_w", "joint_proj", "confidence"),
    }[case if case.startswith("dspark") else case.split("_")[0]]
    if case != "dflash_biased":
        weights = {name: w for name, w in weights.items() if not ("self_attn" in name and name.endswith("bias"))}
    parts = (*tables, "_conv.", "selector.", "markov_head.", "confidence")
    weights = {
        name: w
        for name, w in weights.items()
        if not any(part in name for part in parts) or any(part in name for part in kept)
    }
    return {**weights, "confidence_head.proj.weight": plain} if case == "dspark_yarn" else weights


def write_drafter(path: Path, config: dict, weights: dict[str, mx.array]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(path / "model.safetensors"), weights)
    return path


def golden_drafter(case: str, **changes):
    """A case's drafter, built in memory with parts of its config changed."""
    config = DrafterConfig.from_dict({**golden_config(case), **changes})
    drafter = build(replace(config, enable_confidence_head=case.startswith("dspark")), golden_target())
    own = {name: w for name, w in case_weights(case).items() if not name.startswith(("embed_tokens", "lm_head"))}
    drafter.model.load_weights([(name, w.astype(mx.float32)) for name, w in own.items()])
    return drafter


def shown(drafter, width: int = 4, policy=None):
    context = drafter.new_context()
    rows = mx.random.normal((1, 9, HIDDEN * len(drafter.tap_ids)), key=mx.random.key(0))
    drafter.observe(context, tokens(1, 9), rows, 9)
    greedy = policy or Greedy()
    return drafter.propose(context, mx.array([5], dtype=mx.int32), width, greedy), greedy


def propose(drafter) -> mx.array:
    context, greedy = drafter.new_context(), Greedy()
    features = mx.random.normal((1, 9, 2 * HIDDEN), key=mx.random.key(0))
    drafter.observe(context, mx.zeros((1, 9), dtype=mx.int32), features, 9)
    drafter.propose(context, mx.array([5], dtype=mx.int32), drafter.max_width, greedy)
    return greedy.logits
