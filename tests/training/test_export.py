"""Exports: what our loader makes of them, and what the engines do that they are made for, where these are installed."""

import json
from pathlib import Path

import mlx.core as mx
import pytest
from engines import ENGINES, MODULES, made, proposals
from mlx.utils import tree_flatten
from rig import tiny

from specmlx.drafters.checkpoint import load_drafter
from specmlx.training.export import PACKAGINGS, check_export, export

GOLDENS = json.loads((Path(__file__).parents[1] / "goldens" / "exports.json").read_text())
PAIRS = [(packaging, kind) for packaging, kinds in PACKAGINGS.items() for kind in kinds]


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
    assert proposals(back) == proposals(drafter)


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


@pytest.mark.parametrize(("engine", "case"), [(engine, case) for engine, cases in GOLDENS.items() for case in cases])
def test_an_export_proposes_what_the_engine_it_is_for_proposed(engine, case, tmp_path):
    packaging, kind, window = case.split()
    target, drafter = made(kind, None if window == "full" else int(window))
    export(drafter, target, packaging, tmp_path, anchors=24, verifier="tiny")
    assert proposals(load_drafter(tmp_path, target, mx.float32)) == GOLDENS[engine][case]


@pytest.mark.parametrize(("engine", "case"), [(engine, case) for engine, cases in ENGINES.items() for case in cases])
def test_an_engine_that_is_installed_loads_an_export_and_proposes_the_same(engine, case, tmp_path):
    pytest.importorskip(MODULES[engine], reason=f"needs {engine}")
    packaging, kind, window = case.split()
    target, drafter = made(kind, None if window == "full" else int(window))
    export(drafter, target, packaging, tmp_path, anchors=24, verifier="tiny")
    assert ENGINES[engine][case](tmp_path, target, drafter) == proposals(drafter)
