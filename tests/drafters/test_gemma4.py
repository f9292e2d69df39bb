"""Gemma 4: DeepSpec's drafters for it, against their torch code and on mlx-lm's model of it."""

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from drafter_kit import StandInTarget
from mlx_lm.models import gemma4_text
from replay_kit import observe_rows, observe_verified, replay
from rig import generate_tokens, same_bits

from specmlx.cache.conversation import Conversation
from specmlx.decoding.policy import Policy
from specmlx.decoding.stats import Stats
from specmlx.drafters.checkpoint import load_drafter
from specmlx.drafters.pairing import check_pair
from specmlx.targets.any_lm import AnyLM

HERE = Path(__file__).parents[1] / "goldens" / "gemma4"
CASES = ("shared", "values")
PROPORTIONAL = dict(rope_theta=1e4, rope_type="proportional")


def config(case: str = "shared") -> dict:
    return json.loads((HERE / case / "config.json").read_text())


def target(case: str) -> StandInTarget:
    """The target whose tables the case's file has copies of."""
    weights = mx.load(str(HERE / case / "model.safetensors"))
    return StandInTarget(*(weights[name].astype(mx.float32) for name in ("embed_tokens.weight", "lm_head.weight")))


@pytest.fixture(scope="module")
def expected():
    return mx.load(str(HERE / "expected.safetensors"))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("how", [observe_rows, observe_verified])
def test_proposals_are_those_of_deepspecs_code(case, how, expected):
    drafter = load_drafter(HERE / case, target(case), dtype=mx.float32)
    for i, (proposal, logits) in enumerate(replay(drafter, expected, how(drafter))):
        assert mx.abs(logits[0] - expected[f"{case}.logits"][i]).max().item() <= 3e-5, f"round {i}"
        assert proposal.tokens[0].tolist() == expected[f"{case}.tokens"][i].tolist()
        assert mx.abs(proposal.confidence[0] - expected[f"{case}.confidence"][i]).max().item() <= 3e-6


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"enable_moe_block": True}, "enable_moe_block True: not supported yet"),
        ({"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input 8: not"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers 2: not"),
        ({"hidden_activation": "silu"}, "hidden_activation 'silu': not"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "full_attention None: how are"),
        ({"rope_parameters": {"full_attention": {"rope_theta": "x"}}}, "rope_theta is 'x': it must be a number"),
        (
            {"rope_parameters": {"full_attention": PROPORTIONAL | {"partial_rotary_factor": 2}}},
            "partial_rotary_factor is 2: it must be a positive number at most 1",
        ),
        ({"hidden_size": 48}, "hidden size: the drafter's is 48, the target's 32"),
    ],
)
def test_what_deepspec_has_not_is_refused_in_one_line(changes, says):
    (reason,) = check_pair(target("shared").config, config() | changes)
    assert says in reason


def gemma4() -> nn.Module:
    """mlx-lm's model with random weights that a drafter of the goldens fits."""
    mx.random.seed(0)
    own = {k: v for k, v in config().items() if k not in ("architectures", "layer_types", "num_kv_shared_layers")}
    sizes = dict(num_hidden_layers=6, layer_types=["sliding_attention", "full_attention"] * 3, num_kv_shared_layers=0)
    sizes |= dict(tie_word_embeddings=True, vocab_size_per_layer_input=64)
    model = gemma4_text.Model(gemma4_text.ModelArgs.from_dict(own | sizes))
    mx.eval(model.parameters())
    return model


@pytest.mark.linux_bits
def test_it_drafts_for_mlx_lms_model_whose_layers_return_their_keys_too():
    model = AnyLM(gemma4())
    drafter = load_drafter(HERE / "shared", model, dtype=mx.float32)
    # The cap of the target's own code would come on top of the drafter's.
    h = mx.random.normal((1, 3, 32))
    raw = model.lm.model.embed_tokens.as_linear(h)
    assert mx.allclose(drafter.logits(h), mx.tanh(raw / 4) * 4, atol=1e-5).item()

    def text(drafter):
        stats = Stats()
        options = dict(max_tokens=20, stats=stats)
        tokens = generate_tokens(model, Conversation(model.new_states()), [5, 9, 2], Policy(), drafter, **options)
        return [token.id for token in tokens], stats.proposed

    drafted, plain = text(drafter), text(None)
    assert drafted[0] == plain[0] and drafted[1] > plain[1] == 0


@pytest.mark.linux_bits
def test_taps_are_the_rows_that_the_layers_return_first():
    model = AnyLM(gemma4())
    ids = mx.array([[3, 1, 4, 1, 5]])
    kept = []

    class Seen(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer, self.layer_type = layer, layer.layer_type

        def __call__(self, *args, **kwargs):
            kept.append(self.layer(*args, **kwargs))
            return kept[-1]

    features = model.verify(model.new_states(), ids, (1, 4)).features
    model.lm.model.layers = [Seen(layer) for layer in model.lm.model.layers]
    model.lm(ids)
    assert same_bits([features], [mx.concatenate([kept[1][0], kept[4][0]], axis=-1)])
