"""Whole proposals on the draft head's kernels, run by the simulator, against the same ones slot by slot."""

import mlx.core as mx
import msl
import pytest
from drafter_kit import HIDDEN, VOCAB, golden_drafter, shown
from rig import serve

from specmlx.decoding.policy import Policy
from specmlx.decoding.sampling import make_sampler
from specmlx.drafters.proposal import DraftPolicy
from specmlx.drafters.settings import DraftSettings

SIMULATOR = msl.Simulator()
POLICIES = {
    "greedy": Policy().at(10),
    "seeded": Policy(make_sampler(temp=0.8), None, 3).at(10),
    "sampled": Policy(make_sampler(temp=0.8)).at(10),
    "seeded, filtered": Policy(make_sampler(temp=0.8, top_p=0.9, top_k=20), None, 3).at(10),
}


class BySlot(DraftPolicy):
    """A policy that nobody asks for draws."""

    greedy = False

    def __init__(self, policy):
        self.draft = policy.draft


def drafter(case: str):
    drafter = golden_drafter(case.split()[0])
    if case.startswith("dspark"):
        # The chain's kernel takes ranks in whole lines.
        head = drafter.model.markov_head
        head.markov_w1.weight, head.markov_w2.weight = (
            mx.random.normal((VOCAB, 64), key=mx.random.key(i)) / 8 for i in (1, 2)
        )
        drafter.model.confidence_head.proj.weight = mx.zeros((1, HIDDEN + 64))
    if case.endswith("top 6"):
        DraftSettings(draft_markov_top_k=6).apply(drafter)
    return drafter


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", ["dspark", "dspark top 6", "dflash2_full"])
def test_a_proposal_of_the_kernels_is_the_one_of_slot_by_slot(case, policy, monkeypatch):
    ours, slots = drafter(case), drafter(case)
    before = len(SIMULATOR.reports)
    with monkeypatch.context() as patch:
        serve(patch, SIMULATOR.metal_kernel, "draft_head")
        got, _ = shown(ours, 7, POLICIES[policy])
        mx.eval(got.tokens)
    launched = [report.name.removeprefix("specmlx_draft_") for report in SIMULATOR.reports[before:]]
    if (case, policy) != ("dflash2_full", "greedy"):
        # Greedy, DFlash 2 takes the best path, which slot by slot is not the one of the best tokens.
        want, _ = shown(slots, 7, BySlot(POLICIES[policy]))
        assert got.tokens.tolist() == want.tokens.tolist()
        assert (got.q is None) == (want.q is None)
        assert got.q is None or mx.allclose(got.q, want.q, atol=1e-5).item()
    if policy == "seeded, filtered":
        expected = ["top_k", "merge"] * (7 if case == "dspark" else 1)
    elif case == "dspark":
        expected = ["chain_logits" if policy == "sampled" else "chain"] * 7 + ["last"]
    else:
        expected = ["top_k", "merge", "path" if (case, policy) == ("dflash2_full", "greedy") else "walk"]
    assert launched == expected
