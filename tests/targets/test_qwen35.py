"""DSpark drafters of Qwen 3.5's layers (Qwen35DSparkModel), against mlx-dspark."""

import json
from pathlib import Path

import mlx.core as mx
import pytest
from drafter_kit import StandInTarget
from replay_kit import observe_rows, observe_verified, replay

from specmlx.drafters.checkpoint import load_drafter
from specmlx.drafters.pairing import check_pair

HERE = Path(__file__).parents[1] / "goldens" / "qwen35"
CONFIG = json.loads((HERE / "config.json").read_text())


def target() -> StandInTarget:
    """One whose tables are other than the drafter's own."""
    return StandInTarget(*mx.random.normal((2, 64, 32), key=mx.random.key(1)))


@pytest.mark.parametrize("how", [observe_rows, observe_verified])
def test_proposals_are_those_of_mlx_dspark(how):
    expected = mx.load(str(HERE / "expected.safetensors"))
    drafter = load_drafter(HERE, target(), dtype=mx.float32)
    for i, (proposal, logits) in enumerate(replay(drafter, expected, how(drafter))):
        assert mx.abs(logits[0] - expected["logits"][i]).max().item() <= 3e-5, f"round {i}"
        assert proposal.tokens[0].tolist() == expected["tokens"][i].tolist()
        assert proposal.confidence.shape == (1, 7)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 2}},
            "partial_rotary_factor is 2: it must be a positive number at most 1",
        ),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": "x"}}, "partial_rotary_factor is 'x'"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.2}}, "partial_rotary_factor is 0.2"),
        ({"architectures": ["Qwen3DSparkModel"]}, "gated attention (enable_qwen35_gated_q_proj): not supported"),
        ({"log_snr_conditioning": True}, "log_snr_conditioning: not supported"),
        ({"hidden_size": 48}, "hidden size: the drafter's is 48, the target's 32"),
    ],
)
def test_what_can_not_be_run_is_refused_in_one_line(changes, says):
    (reason,) = check_pair(target().config, CONFIG | changes)
    assert says in reason
