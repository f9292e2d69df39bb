"""Whole passes of a quantized hybrid on our kernels, run by the simulator with the library's own launches."""

from collections import Counter

import mlx.core as mx
import msl
import pytest
import rig

from specmlx.kernels.choice import STOCK, Chooser, Outcome, Table
from specmlx.kernels.chosen import choose_kernels, restore

# One layer of each kind, with heads that the attention kernel takes.
LAYERS = dict(num_hidden_layers=2, full_attention_interval=2, head_dim=64)


def chooser(tmp_path, consistent=False, **seconds: float) -> Chooser:
    outcome = Outcome({n: {STOCK: 1.0, **seconds} for n in (1, 32, 128)})
    table = Table.read(tmp_path / "kernels.json", "Apple M99")
    return Chooser(table=table, race=lambda *_: outcome, available=True, consistent=consistent)


def on_kernels(model, sim: msl.Simulator, chooser: Chooser) -> None:
    choose_kernels(model, mx.bfloat16, chooser, sim.metal_kernel, serve=lambda *_, **__: sim.metal_kernel)


def logits(model, rows: mx.array, states=None) -> mx.array:
    return model.verify(model.new_states() if states is None else states, rows).logits


@pytest.mark.parametrize("form", ["A", "AX", "B", "V"])
@pytest.mark.parametrize("changes", [{}, rig.EXPERTS, rig.NEXT], ids=["dense", "experts", "next"])
def test_a_pass_on_the_kernels_is_that_of_mlx_up_to_rounding(tmp_path, form, changes):
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
    before = len(sim.reports)
    assert mx.array_equal(logits(model, rows), stock)
    assert len(sim.reports) == before
