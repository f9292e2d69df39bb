"""DFlash and DFlash 2 against z-lab's torch code, DSpark against DeepSpec's, in rounds of 1, 2 and a block of rows."""

import mlx.core as mx
import pytest
from drafter_kit import GOLDENS, case_weights, golden_config, golden_target, write_drafter
from replay_kit import observe_rows, observe_verified, replay

from specmlx.drafters.checkpoint import load_drafter

CASES = [
    "dflash_full",
    "dflash_sliding",
    "dflash_sliding_bidirectional",
    "dflash_causal_scaled",
    "dflash_yarn",
    "dflash2_full",
    "dflash2_sliding",
    "dflash2_causal_scaled",
    "dspark",
    "dspark_yarn",
    "dspark_gated",
    "dspark_rnn",
    "dflash_biased",
]


@pytest.fixture(scope="module")
def expected():
    return mx.load(str(GOLDENS / "expected.safetensors"))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("how", [observe_rows, observe_verified])
def test_proposals_are_those_of_the_publishers_code(case, how, expected, tmp_path):
    path = write_drafter(tmp_path, golden_config(case), case_weights(case))
    drafter = load_drafter(path, golden_target(), dtype=mx.float32)
    for i, (proposal, logits) in enumerate(replay(drafter, expected, how(drafter))):
        wanted = expected[f"{case}.logits"][i]
        # -inf where DFlash 2 has no candidate.
        same = (logits[0] == wanted) | (mx.abs(logits[0] - wanted) <= 3e-5)
        assert mx.all(same).item(), f"round {i}"
        assert proposal.tokens[0].tolist() == expected[f"{case}.tokens"][i].tolist(), f"round {i}"
        if (confidence := expected.get(f"{case}.confidence")) is None:
            assert proposal.confidence is None
        else:
            assert mx.abs(proposal.confidence[0] - confidence[i]).max().item() <= 3e-6


def test_the_rounds_cross_the_window_with_one_two_and_a_block_of_rows(expected):
    rows = expected["rows"].tolist()
    lengths = [sum(rows[: i + 1]) for i in range(len(rows))]
    assert {11, 12, 13} <= set(lengths)
    above = {n for n, length in zip(rows, lengths, strict=True) if length - n >= 12}
    assert {1, 2, 8} <= above
