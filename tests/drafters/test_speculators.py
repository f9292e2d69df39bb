"""speculators packages: the package's own files and forward pass, and what it leaves open (see goldens/)."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from drafter_kit import Greedy, StandInTarget, write_drafter

from specmlx.decoding.policy import Policy
from specmlx.decoding.sampling import make_sampler
from specmlx.drafters.checkpoint import load_drafter
from specmlx.drafters.config import DrafterConfig

GOLDENS = Path(__file__).parents[1] / "goldens" / "speculators"
CASES = ["dflash", "dflash_reduced", "dflash2", "dspark", "dspark_bidirectional", "dspark_rnn"]


@pytest.fixture(scope="module")
def expected():
    return mx.load(str(GOLDENS / "expected.safetensors"))


def target(expected) -> StandInTarget:
    return StandInTarget(expected["embed_tokens"], expected["lm_head"])


def config(case: str) -> dict:
    return json.loads((GOLDENS / case / "config.json").read_text())


class Text(Greedy):
    """Draws the text's own tokens."""

    def __init__(self, text: list[int]):
        super().__init__()
        self.text = text

    def draft(self, logits, slot):
        super().draft(logits, slot)
        return mx.array([self.text[slot : slot + logits.shape[1]]], dtype=mx.int32), None


def propose(drafter, expected, anchor: int):
    """The logits that a policy is shown where the text goes on as it does, and the proposal."""
    text = expected["tokens"].tolist()
    context, policy = drafter.new_context(), Text(text[anchor + 1 :])
    features = expected["features"][None, :anchor]
    drafter.observe(context, mx.zeros((1, anchor), dtype=mx.int32), features, anchor)
    proposal = drafter.propose(context, mx.array([text[anchor]], dtype=mx.int32), drafter.max_width, policy)
    return policy.logits[0], proposal


@pytest.mark.parametrize("case", CASES)
def test_logits_and_confidence_are_those_of_the_packages_forward_pass(case, expected):
    drafter = load_drafter(GOLDENS / case, target(expected), dtype=mx.float32)
    assert drafter.tap_ids == (1, 4)
    assert drafter.max_width == expected[f"{case}.logits"].shape[1]
    for i, anchor in enumerate(expected["anchors"].tolist()):
        logits, proposal = propose(drafter, expected, anchor)
        wanted = expected[f"{case}.logits"][i]
        if drafter.vocabulary:
            outside = mx.ones((96,), dtype=mx.bool_)
            outside[drafter.vocabulary.ids] = False
            assert mx.all(logits[:, mx.array([j for j, o in enumerate(outside.tolist()) if o])] == -mx.inf).item()
            logits = logits[:, drafter.vocabulary.ids]
        same = (logits == wanted) | (mx.abs(logits - wanted) <= 3e-5)
        assert mx.all(same).item(), anchor
        if (confidence := expected.get(f"{case}.confidence")) is not None:
            assert mx.abs(proposal.confidence[0] - confidence[i]).max().item() <= 3e-6


def test_offsets_make_target_ids_and_the_marks_must_agree(expected, tmp_path):
    weights = mx.load(str(GOLDENS / "dspark" / "model.safetensors"))
    drafter = load_drafter(GOLDENS / "dspark", target(expected))
    ids = (weights["d2t"] + mx.arange(40)).tolist()
    assert drafter.vocabulary.ids.tolist() == ids
    assert [i for i, has in enumerate(weights["t2d"].tolist()) if has] == ids

    def load(**changes):
        shutil.rmtree(tmp_path, ignore_errors=True)
        kept = {name: w for name, w in {**weights, **changes}.items() if w is not None}
        return load_drafter(write_drafter(tmp_path, config("dspark"), kept), target(expected))

    free = next(i for i in range(96) if i not in ids and i > ids[-2])
    moved = mx.array([*ids[:-1], free]) - mx.arange(40)
    with pytest.raises(ValueError, match="t2d and d2t disagree"):
        load(d2t=moved)
    assert load(d2t=moved, t2d=None).vocabulary.ids.tolist() == [*ids[:-1], free]
    with pytest.raises(ValueError, match=r"a vocabulary of 40 .* but no d2t: which ids are they\?"):
        load(d2t=None)
    with pytest.raises(ValueError, match="no lm_head of its own"):
        load(**{"lm_head.weight": None})
    with pytest.raises(ValueError, match="has an id twice"):
        load(d2t=mx.array([ids[0], *ids[:-1]]) - mx.arange(40), t2d=None)
    with pytest.raises(ValueError, match=r"the draft vocabulary has id \d+: the target's has 96"):
        load(d2t=weights["d2t"] + 90, t2d=None)
    with pytest.raises(ValueError, match=r"but d2t \[39\]"):
        load(d2t=weights["d2t"][:39])


def test_sampled_tokens_of_a_reduced_vocabulary_have_a_q_over_the_targets(expected):
    for case in ("dflash_reduced", "dspark"):
        drafter = load_drafter(GOLDENS / case, target(expected), dtype=mx.float32)
        context = drafter.new_context()
        drafter.observe(context, mx.zeros((1, 9), dtype=mx.int32), expected["features"][None, :9], 9)
        policy = Policy(make_sampler(temp=0.9, top_p=0.95), None, None).at(10)
        proposal = drafter.propose(context, mx.array([5], dtype=mx.int32), drafter.max_width, policy)
        assert proposal.q.shape == (1, drafter.max_width, 96)
        assert mx.allclose(proposal.q.sum(axis=-1), mx.ones((1, drafter.max_width))).item()
        known = set(drafter.vocabulary.ids.tolist())
        assert set(proposal.tokens[0].tolist()) <= known
        assert all(i in known for i, p in enumerate(proposal.q.max(axis=(0, 1)).tolist()) if p > 0)


# What a package leaves open


def changed(case: str, **changes) -> dict:
    return {name: value for name, value in {**config(case), **changes}.items() if value != "absent"}


def proposals(count: int | None) -> dict:
    methods = [{"proposal_type": "greedy", "speculative_tokens": count}]
    return {"algorithm": "dspark", "proposal_methods": methods if count is not None else []}


@pytest.mark.parametrize(
    ("case", "count", "said", "width"),
    [
        ("dspark", 5, "absent", 5),
        ("dspark", 4, "absent", 4),
        ("dspark", None, True, 5),
        ("dspark", None, False, 4),
        ("dspark", 2, False, 4),
        ("dflash", None, "absent", 4),
        ("dflash", 5, "absent", 5),
        ("dflash2", None, "absent", 4),
    ],
)
def test_the_first_slot_is_told_by_the_proposal_count_then_by_the_config_then_by_the_kind(case, count, said, width):
    parsed = DrafterConfig.from_dict(changed(case, speculators_config=proposals(count), sample_from_anchor=said))
    assert parsed.max_width == width


@pytest.mark.parametrize(
    ("case", "said", "sliding", "full"),
    [
        ("dflash", False, True, False),
        ("dflash", True, False, False),
        ("dflash2", "absent", False, False),
        ("dflash2", False, True, False),
        ("dspark_rnn", "absent", False, False),
    ],
)
def test_causality_is_the_packages_word_or_the_kinds_default(case, said, sliding, full):
    parsed = DrafterConfig.from_dict(changed(case, sliding_window_non_causal=said))
    assert (parsed.causal(24), parsed.causal(None)) == (sliding, full)


@pytest.mark.parametrize(
    ("config", "question"),
    [
        (changed("dflash", sliding_window_non_causal="absent"), "do rows of a block see the rows after them"),
        (
            changed("dspark", speculators_config=proposals(None), sample_from_anchor="absent"),
            "does the anchor's row propose a token",
        ),
        (changed("dspark", speculators_config=proposals(4)), "does the anchor's row propose a token"),
        (changed("dflash2", sample_from_anchor=True), "does the anchor's row propose a token"),
        (changed("dflash2", aux_hidden_state_layer_ids="absent"), "which of the target's layers feed it"),
        (changed("dspark", aux_hidden_state_layer_ids="absent"), "which of the target's layers feed it"),
        (changed("dspark", transformer_layer_config="absent"), "of what size are its layers"),
        (changed("dspark", target_hidden_size=64), "target_hidden_size is 64, the layers' hidden_size 32"),
        (changed("dspark_rnn", sample_from_anchor=False, speculators_config={}), "does its state begin"),
    ],
)
def test_what_a_package_leaves_open_is_asked_in_one_line(config, question):
    with pytest.raises(ValueError, match=question) as error:
        DrafterConfig.from_dict(config)
    assert "\n" not in str(error.value)
