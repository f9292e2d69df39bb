"""Whole passes of a quantized hybrid on our kernels, run by the simulator with the library's own launches."""

from collections import Counter

import mlx.core as mx
import mlx.nn as nn
import msl
import pytest
import rig
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.tuner.lora import LoRALinear
from rig import generate_tokens, serve

from specmlx.cache.conversation import Conversation
from specmlx.cache.quantized import KVFormat
from specmlx.cli.parity import summary
from specmlx.decoding.policy import Policy
from specmlx.decoding.sampling import make_sampler
from specmlx.drafters.checkpoint import build
from specmlx.drafters.config import DrafterConfig
from specmlx.drafters.ngram import NGram
from specmlx.evaluation.parity import verdicts, verdicts_by_choice
from specmlx.kernels.choice.operator import STOCK
from specmlx.kernels.choice.table import Outcome, Table
from specmlx.kernels.chosen import choose_kernels, restore, run_by_mlx
from specmlx.kernels.dispatch import Chooser
from specmlx.kernels.linear import CHOSEN, in_blocks

# One layer of each kind, with heads that the attention kernel takes.
LAYERS = dict(num_hidden_layers=2, full_attention_interval=2, head_dim=64)
DSPARK = {
    "architectures": ["Qwen3DSparkModel"],
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 282,
    "num_target_layers": 2,
    "rope_theta": 10000.0,
    "block_size": 4,
    "markov_rank": 64,
    "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 1], "projector_type": "dspark"},
}


def chooser(tmp_path, consistent=False, **seconds: float) -> Chooser:
    outcome = Outcome({n: {STOCK: 1.0, **seconds} for n in (1, 32, 128)})
    table = Table.read(tmp_path / "kernels.json", "Apple M99")
    return Chooser(table=table, race=lambda *_: outcome, available=True, consistent=consistent)


@pytest.fixture
def on_kernels(monkeypatch):
    def on_kernels(model, sim: msl.Simulator, chooser: Chooser) -> None:
        serve(monkeypatch, sim.metal_kernel, "attention", "gated_delta", "gated_delta_prefill")
        choose_kernels(model, mx.bfloat16, chooser, sim.metal_kernel)

    return on_kernels


def logits(model, rows: mx.array, states=None) -> mx.array:
    return model.verify(model.new_states() if states is None else states, rows).logits


@pytest.mark.parametrize("form", ["A", "AX", "B", "V"])
@pytest.mark.parametrize("changes", [{}, rig.EXPERTS, rig.NEXT], ids=["dense", "experts", "next"])
def test_a_pass_on_the_kernels_is_that_of_mlx_up_to_rounding(tmp_path, form, changes, on_kernels, monkeypatch):
    sizes = LAYERS | {"moe_intermediate_size": 64, "mlp_only_layers": [1]} if changes else LAYERS
    model = rig.tiny(dtype=mx.bfloat16, bits=4, group_size=64, **(changes | sizes))
    rows, sim = rig.tokens(2, 4), msl.Simulator()
    # In float32: mlx's CPU kernels sum in bfloat16 what ours sum in float32.
    exact = rig.tiny(dtype=mx.float32, bits=4, group_size=64, **(changes | sizes))
    want, stock = logits(exact, rows), logits(model, rows)
    on_kernels(model, sim, chooser(tmp_path, **{form: 0.5}))
    got = logits(model, rows)
    mx.eval(got)
    assert mx.abs(got - want).max().item() <= 1.5 * mx.abs(stock - want).max().item()
    launched = Counter(report.name.removeprefix("specmlx_") for report in sim.reports)
    assert launched["attention_chunks"] == launched["gated_delta"] == 1
    assert any(name.startswith("quantized_matmul") for name in launched)
    restore(model)
    serve(monkeypatch, None)
    before = len(sim.reports)
    assert mx.array_equal(logits(model, rows), stock)
    assert len(sim.reports) == before


@pytest.mark.parametrize("kv_bits", ["int8", 8, 4])
def test_quantized_keys_and_values_are_read_by_the_kernel(kv_bits, monkeypatch):
    model, sim, rows = rig.tiny(dtype=mx.bfloat16, **LAYERS), msl.Simulator(), rig.tokens(2, 9)
    kv_format = KVFormat.read(kv_bits)

    def passes() -> mx.array:
        states = model.new_states(1, kv_format)
        first = model.verify(states, rows[:, :4])
        states.commit(3)
        return mx.concatenate([first.logits, model.verify(states, rows[:, 3:]).logits], axis=1)

    want = passes()
    serve(monkeypatch, sim.metal_kernel, "attention", "gated_delta", "gated_delta_prefill")
    got = passes()
    assert mx.abs(got - want).max().item() <= 0.03 * mx.abs(want).max().item()
    assert [report.name for report in sim.reports].count("specmlx_attention_chunks") == 2


def test_consistent_gives_the_plain_text_and_the_default_choice_parts_at_a_margin(tmp_path, on_kernels):
    model = rig.tiny(dtype=mx.bfloat16, bits=4, group_size=64, **(rig.SMALL | LAYERS))
    tokenizer, sim = rig.small_tokenizer(tmp_path), msl.Simulator()
    # mlx's CPU kernel, which sums in bfloat16, for one row, and ours for more.
    seconds = {1: {"A": 2.0, STOCK: 1.0}, 32: {"A": 1.0, STOCK: 2.0}}
    table = Table.read(tmp_path / "kernels.json", "Apple M99")

    def choose(consistent: bool) -> None:
        race = lambda *_: Outcome(seconds)  # noqa: E731
        on_kernels(model, sim, Chooser(table=table, race=race, available=True, consistent=consistent))

    prompts = [rig.tokens(seed, 5, vocab=282)[0].tolist() for seed in range(2)]
    found = {True: [], False: []}
    told = []
    rows = verdicts_by_choice(lambda: verdicts(model, tokenizer, prompts, {"ngram": NGram(3)}, 8), choose, told.append)
    for consistent, row in rows:
        found[consistent].append(row["ngram"])
    assert all(verdict.passed for verdict in found[True])
    assert not told
    parted = [verdict.difference for verdict in found[False] if not verdict.identical]
    assert parted and all(difference.margin is not None for difference in parted)
    proof, beside = summary({"ngram": found[True]}, {"ngram": found[False]})
    assert proof.startswith("ngram with --consistent: 2 of 2 prompts pass")
    assert "1 of 2 prompts identical, first difference at token" in beside and "top-2 margins" in beside


def test_consistent_holds_mlx_to_one_number_of_rows_where_there_is_no_kernel(tmp_path, on_kernels):
    model = rig.tiny(dtype=mx.bfloat16, **LAYERS, **(rig.EXPERTS | {"moe_intermediate_size": 64}))
    on_kernels(model, msl.Simulator(), chooser(tmp_path, consistent=True))
    assert model.layers[0].linear_attn.consistent
    kinds = {type(module) for _, module in model.named_modules()}
    assert {CHOSEN[nn.Linear], CHOSEN[SwitchLinear]} <= kinds and not {nn.Linear, SwitchLinear} & kinds
    head, shapes = model.language_model.lm_head, []

    def seen(x: mx.array) -> mx.array:
        shapes.append(x.shape)
        return x @ head.weight.T

    x = mx.random.normal((2, 17, 64), key=mx.random.key(0)).astype(mx.bfloat16)
    assert mx.array_equal(head(x), in_blocks(seen, x)) and shapes == [(32, 64), (32, 64)]
    model.model.layers[0].mlp.shared_expert.down_proj = LoRALinear.from_base(nn.Linear(64, 64))
    with pytest.raises(ValueError, match="consistent can't be had: .*down_proj is a LoRALinear"):
        on_kernels(model, msl.Simulator(), chooser(tmp_path, consistent=True))
    small = rig.tiny(dtype=mx.bfloat16, **(LAYERS | {"head_dim": 32}))
    with pytest.raises(ValueError, match="attention has no kernel for heads like this model's"):
        on_kernels(small, msl.Simulator(), chooser(tmp_path, consistent=True))
    on_kernels(small, msl.Simulator(), chooser(tmp_path))
    assert not small.layers[0].linear_attn.consistent
    assert run_by_mlx(small, mx.bfloat16) == ["attention", "dense products"]


RULES = {"greedy": (None, None), "seeded": (make_sampler(temp=0.9), 3), "sampled": (make_sampler(temp=0.9), None)}


@pytest.mark.parametrize("rule", RULES)
def test_rounds_with_every_operator_on_our_kernels(tmp_path, rule, on_kernels, monkeypatch):
    sampler, seed = RULES[rule]
    model, sim = rig.tiny(dtype=mx.bfloat16, bits=4, group_size=64, **(rig.SMALL | LAYERS)), msl.Simulator()
    mx.random.seed(0)
    drafter = build(DrafterConfig.from_dict(DSPARK), model)
    nn.quantize(
        drafter.model,
        64,
        4,
        class_predicate=lambda path, layer: hasattr(layer, "to_quantized") and "markov" not in path,
    )
    drafter.model.set_dtype(mx.bfloat16)
    quick = chooser(tmp_path, AX=0.5)
    on_kernels(model, sim, quick)
    on_kernels(drafter.model, sim, quick)
    serve(monkeypatch, sim.metal_kernel)

    def text(width: int) -> list[int]:
        policy = Policy(sampler, None, seed)
        given = (Conversation(model.new_states()), [5, 9, 3], policy, drafter if width else None, width)
        return [token.id for token in generate_tokens(model, *given, max_tokens=4)]

    plain = text(0)
    begun = len(sim.reports)
    drafted = text(3)
    assert rule == "sampled" or drafted == plain
    launched = Counter(report.name.removeprefix("specmlx_") for report in sim.reports[begun:])
    rounds = launched["accept_residual" if rule == "sampled" else "accept_match"]
    # Both run the prompt's two rows before the last one too.
    assert rounds == launched["gated_delta"] - 1 == launched["attention_chunks"] - 1 > 0
    assert launched["draft_chain_logits" if rule == "sampled" else "draft_chain"] >= rounds
    # Gate and up of two layers, and of the drafter's.
    assert launched["quantized_matmul_paired"] >= 2 * rounds + 1
