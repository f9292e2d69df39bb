"""Exports: what our loader makes of them, and what the engines do that they are made for, where these are installed."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from drafter_kit import Greedy
from mlx.utils import tree_flatten, tree_map
from rig import tiny

from specmlx.drafters.checkpoint import build, load_drafter
from specmlx.drafters.config import DrafterConfig
from specmlx.training.export import PACKAGINGS, check_export, export
from specmlx.training.geometry import drafter_config

MASK, BLOCK, ROWS = 90, 5, 9
PAIRS = [(packaging, kind) for packaging, kinds in PACKAGINGS.items() for kind in kinds]


def made(kind: str, window: int | None = None):
    """A target in bfloat16's values, and a drafter for it of which every tensor matters, in bfloat16's values too."""
    target = tiny(3, vocab_size=96)
    target.update(tree_map(rounded, target.parameters()))
    config = drafter_config(target.config, kind, MASK, block_size=BLOCK, window=window)
    drafter = build(DrafterConfig.from_dict(config), target)
    keys = iter(mx.random.split(mx.random.key(2), 200))

    def random(x: mx.array) -> mx.array:
        if x.ndim == 1:
            return 1 + 0.2 * mx.random.normal(x.shape, key=next(keys))
        return mx.random.normal(x.shape, key=next(keys)) * (1.5 / x.shape[-1] ** 0.5)

    drafter.model.update(tree_map(lambda x: rounded(random(x)), drafter.model.parameters()))
    return target, drafter


def rounded(x: mx.array) -> mx.array:
    return x.astype(mx.bfloat16).astype(mx.float32)


def contexts(drafter):
    """Taps `[1, ROWS, F]` and anchors: `ROWS` rows of context before each."""
    width = len(drafter.tap_ids) * drafter.config.hidden_size
    return rounded(mx.random.normal((1, ROWS, width), key=mx.random.key(7))), range(0, 80, 9)


def ours(drafter) -> list[list[int]]:
    features, anchors = contexts(drafter)
    proposals = []
    for anchor in anchors:
        context = drafter.new_context()
        drafter.observe(context, mx.zeros((1, ROWS), dtype=mx.int32), features, ROWS)
        proposal = drafter.propose(context, mx.array([anchor], dtype=mx.int32), drafter.max_width, Greedy())
        proposals.append(proposal.tokens[0].tolist())
    return proposals


@pytest.mark.parametrize(("packaging", "kind"), PAIRS)
@pytest.mark.parametrize("window", [None, 6])
def test_an_export_loads_back_as_the_same_drafter(packaging, kind, window, tmp_path):
    target, drafter = made(kind, window)
    if packaging == "deepspec" and window:
        with pytest.raises(ValueError, match="has no word for windows"):
            export(drafter, target, packaging, tmp_path)
        assert not list(tmp_path.iterdir())
        return
    export(drafter, target, packaging, tmp_path, anchors=24, verifier="tiny")
    files = mx.load(str(tmp_path / "model.safetensors"))
    assert {x.dtype for x in files.values()} == {mx.bfloat16}
    back = load_drafter(tmp_path, target, mx.float32)
    other = {"rope_scaling", "frozen_copies", "is_causal"} | (
        {"num_target_layers"} if packaging == "speculators" else set()
    )
    fields = vars(back.config).keys() - other
    assert {f: getattr(back.config, f) for f in fields} == {f: getattr(drafter.config, f) for f in fields}
    assert [back.config.causal(w) for w in back.config.windows] == [False] * back.config.num_hidden_layers
    pairs = zip(tree_flatten(back.model.parameters()), tree_flatten(drafter.model.parameters()), strict=True)
    assert all(a == b and mx.array_equal(x, y).item() for (a, x), (b, y) in pairs)
    assert ours(back) == ours(drafter)


@pytest.mark.parametrize("packaging", ["zlab", "deepspec"])
def test_a_packaging_refuses_the_kinds_that_it_does_not_have(packaging):
    kind = {"zlab": "dspark", "deepspec": "dflash2"}[packaging]
    with pytest.raises(ValueError, match=f"--export {packaging} holds dflash|dspark drafters: leave it out"):
        check_export(made(kind)[1].config, packaging)


def test_tables_of_a_quantized_target_are_exported_dense(tmp_path):
    target = tiny(3, bits=8)
    _, drafter = made("dspark")
    export(drafter, target, "deepspec", tmp_path, anchors=24)
    tables = mx.load(str(tmp_path / "model.safetensors"))
    h = mx.random.normal((3, 64), key=mx.random.key(1))
    assert mx.abs(h @ tables["lm_head.weight"].astype(mx.float32).T - target.lm_head(h)).max().item() < 2e-2
    assert mx.array_equal(
        tables["embed_tokens.weight"][5], target.embed_tokens(mx.array([5]))[0].astype(mx.bfloat16)
    ).item()


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
@pytest.mark.parametrize("window", [None, 6])
def test_z_labs_torch_code_loads_an_export_and_proposes_the_same(kind, window, tmp_path):
    theirs = pytest.importorskip("dflash.model", reason="needs torch, transformers and z-lab's dflash 0.1.0")
    target, drafter = made(kind, window)
    export(drafter, target, "zlab", tmp_path)
    cls = theirs.DFlash2DraftModel if kind == "dflash2" else theirs.DFlashDraftModel
    model = loaded(cls, tmp_path)
    head = linear(target.head.weight)

    def propose(features, ids, anchor):
        hidden = model(
            target_hidden=features,
            noise_embedding=embedding(target, ids),
            position_ids=positions(len(ids)),
            past_key_values=theirs._make_cache(model.config),
            use_cache=True,
        )[:, 1:]
        if kind == "dflash2":
            return model.propose(hidden, tensor([anchor]), head, 0.0)[0]
        return model.compute_logits(hidden, head).argmax(-1)

    assert_proposals(drafter, propose)


def test_deepspecs_code_loads_an_export_and_proposes_the_same(tmp_path):
    theirs = pytest.importorskip("deepspec.modeling.dspark.qwen3.modeling", reason="needs torch and DeepSpec's sources")
    from transformers import DynamicCache

    target, drafter = made("dspark")
    export(drafter, target, "deepspec", tmp_path, anchors=24)
    model = loaded(theirs.Qwen3DSparkModel, tmp_path)

    def propose(features, ids, anchor):
        hidden = model._forward_backbone(
            target_hidden_states=features,
            noise_embedding=model.embed_tokens(tensor([ids])),
            position_ids=positions(len(ids)),
            attention_mask=None,
            past_key_values=DynamicCache(),
            use_cache=True,
            is_causal=False,
        )
        return model.sample_draft_tokens(
            model.compute_logits(hidden), first_prev_token_ids=tensor([anchor]), temperature=0.0, hidden_states=hidden
        )[0]

    assert_proposals(drafter, propose)


def test_mlx_dspark_loads_an_export_and_proposes_the_same(tmp_path):
    theirs = pytest.importorskip("mlx_dspark.load", reason="needs mlx-dspark 0.20.3")
    target, drafter = made("dspark")
    export(drafter, target, "deepspec", tmp_path, anchors=24)
    model, _ = theirs.load_drafter(str(tmp_path), quantize=False)
    model.set_dtype(mx.float32)
    features, anchors = contexts(drafter)
    found = []
    for anchor in anchors:
        caches = model.make_ctx_cache()
        model.update_context(features, 0, caches)
        rows = model.embed(mx.array([[anchor] + [MASK] * (BLOCK - 1)]))
        logits = model.compute_logits(model.backbone(rows, ROWS, caches))
        found.append(model.sample_block(logits[0], anchor).tolist())
    assert found == ours(drafter)
    print(f"{sum(map(len, found))} tokens of {len(found)} proposals are the same")


def assert_proposals(drafter, propose: Callable) -> None:
    import torch

    features, anchors = contexts(drafter)
    features = torch.from_numpy(np.array(features))
    with torch.no_grad():
        found = [propose(features, [a] + [MASK] * (BLOCK - 1), a)[0].tolist() for a in anchors]
    assert found == ours(drafter)
    print(f"{sum(map(len, found))} tokens of {len(found)} proposals are the same")


def loaded(cls: type, path):
    import torch

    return cls.from_pretrained(str(path), dtype=torch.float32, attn_implementation="sdpa").eval()


def tensor(values):
    import torch

    return torch.tensor(values)


def positions(block: int):
    return tensor([list(range(ROWS + block))])


def embedding(target, ids):
    import torch

    return torch.from_numpy(np.array(target.embed_tokens(mx.array([ids]))))


def linear(weight):
    import torch

    table = torch.from_numpy(np.array(weight))
    return lambda h: torch.nn.functional.linear(h, table)
