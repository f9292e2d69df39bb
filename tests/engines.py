"""Drafters to export, and what the engines that exports are for make of them."""

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
from drafter_kit import Greedy
from mlx.utils import tree_map
from rig import tiny

from specmlx.drafters.block_drafter import BlockDrafter
from specmlx.drafters.checkpoint import build
from specmlx.drafters.config import DrafterConfig
from specmlx.targets.hybrid import Model
from specmlx.training.geometry import drafter_config

MASK, BLOCK, ROWS, VOCAB = 90, 5, 9, 96
ANCHORS = range(0, 80, 9)


def made(kind: str, window: int | None = None) -> tuple[Model, BlockDrafter]:
    """A target and a drafter for it of which every tensor matters, in bfloat16's values; the same on every machine."""
    rng = np.random.default_rng(2)

    def normal(*shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape, dtype=np.float32))

    target = tiny(3, vocab_size=VOCAB)
    target.embedding.weight, target.head.weight = rounded(normal(VOCAB, 64)), rounded(normal(VOCAB, 64) * 0.2)
    config = drafter_config(target.config, kind, MASK, block_size=BLOCK, window=window)
    drafter = build(DrafterConfig.from_dict(config), target)

    def random(x: mx.array) -> mx.array:
        return rounded(1 + 0.2 * normal(*x.shape) if x.ndim == 1 else normal(*x.shape) * (3 / x.shape[-1] ** 0.5))

    drafter.model.update(tree_map(random, drafter.model.parameters()))
    return target, drafter


def rounded(x: mx.array) -> mx.array:
    return x.astype(mx.bfloat16).astype(mx.float32)


def taps(drafter: BlockDrafter) -> mx.array:
    """Of the rows before every anchor: `[1, ROWS, F]`."""
    width = len(drafter.tap_ids) * drafter.config.hidden_size
    return rounded(mx.array(np.random.default_rng(7).standard_normal((1, ROWS, width), dtype=np.float32)))


def proposals(drafter: BlockDrafter) -> list[list[int]]:
    """What specmlx proposes greedily behind each of `ANCHORS`."""
    found = []
    for anchor in ANCHORS:
        context = drafter.new_context()
        drafter.observe(context, mx.zeros((1, ROWS), dtype=mx.int32), taps(drafter), ROWS)
        proposal = drafter.propose(context, mx.array([anchor], dtype=mx.int32), drafter.max_width, Greedy())
        found.append(proposal.tokens[0].tolist())
    return found


def by_zlab(path: Path, target: Model, drafter: BlockDrafter) -> list[list[int]]:
    import dflash.model as theirs
    from torch.nn.functional import embedding, linear

    selective = drafter.config.kind == "dflash2"
    model = _loaded(theirs.DFlash2DraftModel if selective else theirs.DFlashDraftModel, path)
    table, head = _torch(target.embedding.weight), _torch(target.head.weight)

    def propose(anchor: int) -> list[int]:
        hidden = model(
            target_hidden=_torch(taps(drafter)),
            noise_embedding=embedding(_block(anchor), table),
            position_ids=_positions(),
            past_key_values=theirs._make_cache(model.config),
            use_cache=True,
        )[:, 1:]
        if selective:
            return model.propose(hidden, _block(anchor)[:, 0], lambda h: linear(h, head), 0.0)[0][0].tolist()
        return model.compute_logits(hidden, lambda h: linear(h, head)).argmax(-1)[0].tolist()

    return _all(propose)


def by_deepspec(path: Path, target: Model, drafter: BlockDrafter) -> list[list[int]]:
    import deepspec.modeling.dspark.qwen3.modeling as theirs
    from transformers import DynamicCache

    model = _loaded(theirs.Qwen3DSparkModel, path)

    def propose(anchor: int) -> list[int]:
        hidden = model._forward_backbone(
            target_hidden_states=_torch(taps(drafter)),
            noise_embedding=model.embed_tokens(_block(anchor)),
            position_ids=_positions(),
            attention_mask=None,
            past_key_values=DynamicCache(),
            use_cache=True,
            is_causal=False,
        )
        return model.sample_draft_tokens(
            model.compute_logits(hidden),
            first_prev_token_ids=_block(anchor)[:, 0],
            temperature=0.0,
            hidden_states=hidden,
        )[0][0].tolist()

    return _all(propose)


def by_mlx_dspark(path: Path, target: Model, drafter: BlockDrafter) -> list[list[int]]:
    from mlx_dspark.load import load_drafter

    model, _ = load_drafter(str(path), quantize=False)
    model.set_dtype(mx.float32)
    found = []
    for anchor in ANCHORS:
        caches = model.make_ctx_cache()
        model.update_context(taps(drafter), 0, caches)
        rows = model.embed(mx.array([[anchor] + [MASK] * (BLOCK - 1)]))
        logits = model.compute_logits(model.backbone(rows, ROWS, caches))
        found.append(model.sample_block(logits[0], anchor).tolist())
    return found


def by_speculators(path: Path, target: Model, drafter: BlockDrafter) -> list[list[int]]:
    """By the package's forward pass of training: slot by slot, each given what the slots before it proposed."""
    import torch
    from safetensors.torch import load_file
    from speculators import SpeculatorModelConfig
    from speculators.models.dflash.core import DFlashDraftModel
    from speculators.models.dflash2.core import DFlash2DraftModel
    from speculators.models.dspark.core import DSparkDraftModel

    kind, first = drafter.config.kind, drafter.config.first_row
    config = SpeculatorModelConfig.from_pretrained(str(path))
    config.transformer_layer_config._attn_implementation = "eager"
    # Not looked up on the Hub: the tables are given below.
    config.speculators_config.verifier.name_or_path = None
    cls = {"dflash": DFlashDraftModel, "dflash2": DFlash2DraftModel, "dspark": DSparkDraftModel}[kind]
    model = cls(config)
    weights = {name: x.float() for name, x in load_file(path / "model.safetensors").items()}
    tables = {"embed_tokens.weight": _torch(target.embedding.weight), "lm_head.weight": _torch(target.head.weight)}
    missing, extra = model.load_state_dict({**weights, **tables}, strict=False)
    assert not extra and set(missing) <= {"verifier_lm_head.weight", "verifier_norm.weight"}, (missing, extra)
    model = model.float().eval()

    def propose(anchor: int) -> list[int]:
        tokens = torch.tensor([[1] * ROWS + [anchor] + [MASK] * BLOCK])
        features = torch.zeros(1, tokens.shape[1], taps(drafter).shape[-1])
        features[:, :ROWS] = _torch(taps(drafter))
        at = torch.zeros(tokens.shape)
        at[0, ROWS] = 1
        rows = torch.zeros(1, tokens.shape[1], drafter.config.hidden_size)
        hidden, logits, *_ = model._backbone_forward(features, tokens, at, rows, torch.ones_like(tokens), max_anchors=1)
        hidden, logits, drawn = hidden[:, first:], logits[:, first:], [anchor]
        for k in range(BLOCK - first):
            previous = torch.tensor([[drawn[-1]]])
            h, slot = hidden[:, k : k + 1], logits[:, k : k + 1]
            if kind == "dspark":
                x = model.markov_head.prev_embeddings(previous)
                slot = slot + model.markov_head.block_bias(prev_token_ids=previous, hidden_states=h, prev_emb=x)
            if kind == "dflash2":
                selector = model.candidate_selector
                candidates = slot.topk(selector.top_k, dim=-1).indices
                scores = selector.score_candidates(slot, h, previous, candidates)
                drawn.append(candidates[0, 0, scores[0, 0].argmax()].item())
            else:
                drawn.append(slot[0, 0].argmax().item())
        return drawn[1:]

    return _all(propose)


def _all(propose: Callable[[int], list[int]]) -> list[list[int]]:
    import torch

    with torch.no_grad():
        return [propose(anchor) for anchor in ANCHORS]


def _loaded(cls: type, path: Path):
    import torch

    return cls.from_pretrained(str(path), dtype=torch.float32, attn_implementation="sdpa").eval()


def _torch(x: mx.array):
    import torch

    return torch.from_numpy(np.array(x))


def _block(anchor: int):
    import torch

    return torch.tensor([[anchor] + [MASK] * (BLOCK - 1)])


def _positions():
    import torch

    return torch.arange(ROWS + BLOCK)[None]


ZLAB, DEEPSPEC, MLX_DSPARK, SPECULATORS = "dflash 0.1.0", "DeepSpec", "mlx-dspark 0.20.3", "speculators 0.9.0"
MODULES = {
    ZLAB: "dflash.model",
    DEEPSPEC: "deepspec.modeling.dspark.qwen3.modeling",
    MLX_DSPARK: "mlx_dspark.load",
    SPECULATORS: "speculators.models.dspark.core",
}
# Packaging, kind and window of an export, by engine.
ENGINES: dict[str, dict[str, Callable[[Path, Model, BlockDrafter], list[list[int]]]]] = {
    ZLAB: {f"zlab {kind} {window}": by_zlab for kind in ("dflash", "dflash2") for window in ("full", 6)},
    DEEPSPEC: {"deepspec dspark full": by_deepspec},
    MLX_DSPARK: {"deepspec dspark full": by_mlx_dspark},
    SPECULATORS: {f"speculators {kind} full": by_speculators for kind in ("dflash", "dflash2", "dspark")},
}
