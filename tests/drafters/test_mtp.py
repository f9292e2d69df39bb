"""The MTP head: what it keeps, what it proposes, and how it is trained and loaded."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from drafter_kit import Greedy, write_drafter
from mlx.utils import tree_flatten, tree_unflatten
from publishers import fp4_values, fp8_values, random_fp8, tensor, write_safetensors
from rig import EXPERTS, generate_tokens, tiny, tokens

from specmlx.cache.conversation import Conversation
from specmlx.decoding.policy import Policy
from specmlx.decoding.sampling import make_sampler
from specmlx.drafters.checkpoint import load_mtp
from specmlx.drafters.mtp import MTP, MTPHead
from specmlx.loading.load import load_drafter
from specmlx.targets.checkpoint import load_target
from specmlx.training.losses import DraftLoss, mtp_loss

GOLDENS = Path(__file__).parents[1] / "goldens"
LENGTH = 24


class Forced(Greedy):
    """Draws given tokens, whatever the logits."""

    def __init__(self, drawn: list[int]):
        super().__init__()
        self.drawn = drawn

    def draft(self, logits, slot):
        super().draft(logits, slot)
        return mx.full((len(logits), 1), self.drawn[slot], dtype=mx.int32), None


def pair(width: int = 4) -> MTP:
    target = tiny(3)
    mx.random.seed(6)
    head = MTPHead(target.config)
    for name, weight in tree_flatten(head.parameters()):
        if "norm" in name:
            head.update(tree_unflatten([(name, weight + 0.2 * mx.random.normal(weight.shape))]))
    return MTP(head, target, width)


def observed(drafter: MTP, ids: mx.array, steps: list[int] | None = None):
    """A context that has observed ids `[B, n]`, in steps of so many."""
    _, features = drafter.target.features(ids, drafter.tap_ids)
    context, at = drafter.new_context(len(ids)), 0
    for n in steps or [ids.shape[1]]:
        drafter.observe(context, ids[:, at : at + n], features[:, at : at + n], n)
        at += n
    return context


def shown(drafter: MTP, context, anchor: int, drawn: list[int]) -> mx.array:
    policy = Forced(drawn)
    drafter.propose(context, mx.array([anchor], dtype=mx.int32), len(drawn), policy)
    return policy.logits[0]


def test_training_sees_the_logits_that_drafting_shows():
    drafter, ids = pair(), tokens(1, LENGTH + 1)
    text, terms = ids[0].tolist(), DraftLoss(token=1.0, decay=1e9)
    for anchor in (1, 9, 17):
        weights = mx.ones((1, LENGTH))
        loss, _ = mtp_loss(drafter, drafter.target, terms)(drafter.model, ids, weights, mx.array([[anchor]]))
        logits = shown(drafter, observed(drafter, ids[:, :anchor]), text[anchor], text[anchor + 1 : anchor + 5])
        log_q = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        losses = [-log_q[k, text[anchor + 1 + k]].item() for k in range(4)]
        assert loss.item() == pytest.approx(np.mean(losses), rel=1e-5)


# Against transformers


def golden_directory(path: Path, *extra: Path) -> Path:
    path.mkdir()
    for file in [*(GOLDENS / "target_tied" / "checkpoint").iterdir(), *extra]:
        shutil.copy(file, path)
    return path


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    head = GOLDENS / "mtp" / "model-mtp.safetensors"
    directory = golden_directory(tmp_path_factory.mktemp("mtp") / "target", head)
    target, _ = load_target(directory, dtype=mx.float32)
    expected = mx.load(str(GOLDENS / "mtp" / "expected.safetensors"))
    return target, expected, mx.load(str(GOLDENS / "target_tied" / "expected.safetensors"))


class RowsAsLogits:
    """The golden target, whose head shows the rows that it is given."""

    def __init__(self, target):
        self.config, self.model, self.embed_tokens = target.config, target.model, target.embed_tokens

    def head(self, hidden: mx.array) -> mx.array:
        return hidden


@pytest.mark.parametrize("rejected", [False, True])
def test_rows_and_drafts_are_those_of_transformers_layers(golden, rejected):
    target, expected, text = golden
    drafter = load_drafter("mtp", target)
    rows = MTP(drafter.model, RowsAsLogits(target))
    features, ids = text["tap.3"][None], text["tokens"].astype(mx.int32)
    context, start = drafter.new_context(), 0
    for i, end in enumerate(expected["rows"].tolist()):
        block, count = features[:, start:end], end - start
        if rejected:
            # As the loop does: rows behind the accepted ones are not even finite, and the count is unread.
            block = mx.concatenate([block, mx.full((1, 5, block.shape[2]), float("nan"))], axis=1)
            count = mx.array([count], dtype=mx.int32) + 0
        drafter.observe(context, ids[None, start : start + block.shape[1]], block, count)
        start = end
        drafts = expected["tokens"][i].tolist()
        assert drafter.propose(context, ids[end : end + 1], 4, Greedy()).tokens[0].tolist() == drafts
        policy = Forced(drafts)
        rows.propose(context, ids[end : end + 1], 4, policy)
        assert mx.abs(policy.logits[0] - expected["hidden"][i]).max().item() <= 1e-5, end


# What is kept


def test_a_prompt_may_be_observed_in_any_steps_and_lanes_keep_their_own_lengths():
    drafter, text = pair(), tokens(2, 20)
    lanes = mx.concatenate([text, tokens(3, 20), tokens(4, 20)])
    lengths = [20, 1, 7]
    _, features = drafter.target.features(lanes, drafter.tap_ids)
    together = drafter.new_context(3)
    for start in range(0, 20, 4):
        counts = mx.array([min(max(n - start, 0), 4) for n in lengths], dtype=mx.int32)
        late = mx.arange(4) >= counts[:, None]
        block = mx.where(late[..., None], float("nan"), features[:, start : start + 4])
        drafter.observe(together, lanes[:, start : start + 4], block, counts)
    policy = Forced([5, 6, 7, 8])
    drafter.propose(together, mx.array([1, 2, 3], dtype=mx.int32), 4, policy)
    for lane, n in enumerate(lengths):
        alone = observed(drafter, lanes[lane : lane + 1, :n], [1] * n)
        assert mx.allclose(policy.logits[lane], shown(drafter, alone, lane + 1, [5, 6, 7, 8]), atol=2e-5).item(), lane


def test_nothing_is_proposed_before_the_target_has_run_a_row():
    drafter = pair()
    context = drafter.new_context()
    anchor = mx.array([5], dtype=mx.int32)
    assert drafter.propose(context, anchor, 4, Greedy()).tokens.shape == (1, 0)
    drafter.observe(context, tokens(1, 1), mx.ones((1, 1, 64)), 1)
    assert drafter.propose(context, anchor, 4, Greedy()).tokens.shape == (1, 4)


def test_a_proposal_that_is_dropped_leaves_no_trace():
    drafter, ids = pair(), tokens(5, 12)
    clean = shown(drafter, observed(drafter, ids), 3, [1, 2])
    context = observed(drafter, ids)
    shown(drafter, context, 9, [5, 6, 7, 8])
    assert mx.array_equal(shown(drafter, context, 3, [1, 2]), clean).item()


@pytest.mark.parametrize("stay", [0, 1, 3, 5])
def test_rows_that_were_shown_ahead_and_do_not_stay_are_forgotten(stay):
    drafter, ids = pair(), tokens(5, 12)
    _, features = drafter.target.features(ids, drafter.tap_ids)
    context = observed(drafter, ids[:, :7])
    drafter.observe(context, ids[:, 7:], features[:, 7:], mx.array([5]))
    shown(drafter, context, 9, [5, 6, 7, 8])
    for count in (5, stay):
        context.settle(count)
    assert (context.max_length, context.length.item()) == (7 + stay, 7 + stay)
    alone = observed(drafter, ids[:, : 7 + stay])
    assert mx.allclose(shown(drafter, context, 3, [1, 2]), shown(drafter, alone, 3, [1, 2]), atol=2e-5).item()


def test_a_packed_context_proposes_as_the_one_that_it_was_taken_from():
    drafter, ids = pair(), mx.concatenate([tokens(5, 12), tokens(6, 12)])
    context = observed(drafter, ids)
    copy = drafter.new_context()
    copy.unpack(context.pack(1))
    alone = observed(drafter, ids[1:])
    assert mx.allclose(shown(drafter, copy, 3, [1, 2]), shown(drafter, alone, 3, [1, 2]), atol=2e-5).item()


def test_contexts_join_and_part():
    drafter, text = pair(), [tokens(n, n) for n in (3, 300, 12)]
    joined = observed(drafter, text[0]).joined([observed(drafter, ids) for ids in text[1:]])
    assert joined.joined([drafter.new_context()]).length.tolist() == [3, 300, 12, 0]
    policy = Forced([1, 2, 3, 4])
    drafter.propose(joined, mx.array([5, 5, 5], dtype=mx.int32), 4, policy)
    for lane, ids in enumerate(text):
        alone = shown(drafter, observed(drafter, ids), 5, [1, 2, 3, 4])
        assert mx.allclose(policy.logits[lane], alone, atol=2e-5).item()
        assert mx.allclose(shown(drafter, joined.lanes([lane]), 5, [1, 2, 3, 4]), alone, atol=2e-5).item()


def test_features_that_do_not_fit_are_refused():
    drafter = pair()
    with pytest.raises(ValueError, match="can't observe 3 rows: there are 2"):
        drafter.observe(drafter.new_context(), tokens(1, 2), mx.ones((1, 2, 64)), 3)
    with pytest.raises(ValueError, match="features are 128 wide: this drafter's are 64, the outputs of layers"):
        drafter.observe(drafter.new_context(), tokens(1, 2), mx.ones((1, 2, 128)), 2)
    with pytest.raises(ValueError, match="num_draft_tokens is 5: this drafter proposes 0 to 4"):
        drafter.propose(drafter.new_context(), mx.array([1]), 5, Greedy())


# Weights


def test_every_tensor_changes_what_is_proposed_and_learns():
    drafter, ids = pair(), tokens(7, LENGTH + 1)
    before = shown(drafter, observed(drafter, ids[:, :9]), 3, [1, 2, 3, 4])
    for name, weight in tree_flatten(drafter.model.parameters()):
        noise = 0.1 * mx.random.normal(weight.shape, key=mx.random.key(1))
        drafter.model.update(tree_unflatten([(name, weight + noise)]))
        after = shown(drafter, observed(drafter, ids[:, :9]), 3, [1, 2, 3, 4])
        assert mx.abs(after - before).max().item() > 1e-4, name
        drafter.model.update(tree_unflatten([(name, weight)]))
    loss = mtp_loss(drafter, drafter.target, DraftLoss(soft=1.0, l1=1.0))
    _, gradients = nn.value_and_grad(drafter.model, loss)(
        drafter.model, ids, mx.ones((1, LENGTH)), mx.array([[3, 9, -1]])
    )
    assert [name for name, g in tree_flatten(gradients) if not mx.abs(g).max().item() > 0] == []


def test_a_head_whose_mlp_is_a_mixture_of_experts_proposes():
    target = tiny(3, **EXPERTS)
    drafter = MTP(MTPHead(target.config), target)
    assert mx.isfinite(shown(drafter, observed(drafter, tokens(1, 6)), 3, [1, 2])).all().item()


def test_a_split_repository_holds_whole_norms_and_names_without_the_prefix(golden, tmp_path):
    target = golden[0]
    drafter = load_drafter("mtp", target)
    text = json.loads((GOLDENS / "target_tied" / "checkpoint" / "config.json").read_text())
    split = write_drafter(
        tmp_path, {"model_type": "qwen3_5_mtp", "text_config": text}, dict(tree_flatten(drafter.model.parameters()))
    )
    loaded = load_drafter(str(split), target)
    pairs = zip(tree_flatten(loaded.model.parameters()), tree_flatten(drafter.model.parameters()), strict=True)
    assert all(mx.array_equal(a, b).item() for (_, a), (_, b) in pairs)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_size": 48}, "hidden size: the MTP head's target has 48, this one 32"),
        ({"vocab_size": 97}, "vocabulary: the MTP head's target has 97, this one 96"),
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers is 2"),
        ({"mtp_use_dedicated_embeddings": True}, "an embedding of its own"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_before_its_weights_are_read(golden, changes, says, tmp_path):
    text = json.loads((GOLDENS / "target_tied" / "checkpoint" / "config.json").read_text())
    split = write_drafter(tmp_path, {"model_type": "qwen3_5_mtp", "text_config": {**text, **changes}}, {})
    (split / "model.safetensors").write_bytes(b"not read")
    with pytest.raises(ValueError, match=says):
        load_drafter(str(split), golden[0])


@pytest.mark.parametrize("codes", ["fp8", "nvfp4"])
def test_a_heads_fp8_and_fp4_codes_draft_as_the_numbers_that_they_stand_for(golden, codes, tmp_path):
    head = mx.load(str(GOLDENS / "mtp" / "model-mtp.safetensors"))
    rng, packed, dense = np.random.default_rng(0), {}, {}
    for name, weight in head.items():
        stem, (N, K) = name.removesuffix(".weight"), (weight.shape[0], weight.shape[-1])
        if weight.ndim == 1 or name == "mtp.fc.weight":
            packed[name], dense[name] = tensor("F16", np.array(weight)), weight
        elif codes == "fp8":
            values, scale = random_fp8(rng, N, K), rng.uniform(1, 3, (N // 32, K // 32)).astype(np.float32) * 1e-3
            packed |= {name: tensor("F8_E4M3", values), f"{stem}.weight_scale_inv": tensor("F32", scale)}
            dense[name] = mx.array(fp8_values(values) * scale.repeat(32, 0).repeat(32, 1))
        else:
            values, scales = (
                rng.integers(0, 256, (N, K // 2), np.uint8),
                rng.integers(0x20, 0x40, (N, K // 16), np.uint8),
            )
            packed |= {name: tensor("U8", values), f"{stem}.weight_scale": tensor("F8_E4M3", scales)}
            packed[f"{stem}.weight_scale_2"] = tensor("F32", np.array(np.float32(0.1)))
            dense[name] = mx.array(fp4_values(values, scales) * np.float32(0.1))
    target = golden[0]

    def drafts(path: Path) -> mx.array:
        drafter = load_mtp(path, target, mx.float32)
        return shown(drafter, observed(drafter, tokens(7, 9)), 3, [1, 2, 3])

    files = golden_directory(tmp_path / "packed")
    config = json.loads((files / "config.json").read_text())
    quantization = (
        {"quant_method": "fp8", "weight_block_size": [32, 32]} if codes == "fp8" else {"quant_method": "modelopt"}
    )
    (files / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    write_safetensors(files / "model-mtp.safetensors", packed)
    plain = golden_directory(tmp_path / "dense")
    mx.save_safetensors(str(plain / "model-mtp.safetensors"), dense)
    assert mx.allclose(drafts(files), drafts(plain), rtol=0, atol=1e-4).item()
    write_safetensors(files / "model-mtp.safetensors", {k: v for k, v in packed.items() if "scale" not in k})
    with pytest.raises(ValueError, match="weight is .*uint8|should be"):
        load_mtp(files, target)


def test_a_target_without_a_head_says_so(tmp_path):
    target, _ = load_target(golden_directory(tmp_path / "target"), dtype=mx.float32)
    with pytest.raises(ValueError, match=r"target has no mtp\.\* tensors"):
        load_drafter("mtp", target)
    with pytest.raises(ValueError, match="needs a target that was loaded from files"):
        load_drafter("mtp", tiny(3))


def test_missing_and_extra_tensors_of_a_head_are_listed(golden, tmp_path):
    directory = golden_directory(tmp_path / "target")
    weights = mx.load(str(GOLDENS / "mtp" / "model-mtp.safetensors"))
    weights["mtp.extra.weight"] = weights.pop("mtp.fc.weight")
    mx.save_safetensors(str(directory / "model-mtp.safetensors"), weights)
    target, _ = load_target(directory, dtype=mx.float32)
    with pytest.raises(ValueError, match="missing fc.weight; extra extra.weight"):
        load_drafter("mtp", target)


# The loop


@pytest.mark.parametrize("seed", [None, 7])
def test_text_with_a_head_is_the_plain_text_and_turns_go_on(seed):
    drafter = pair()
    target = drafter.target
    policy = Policy(make_sampler(temp=0.8) if seed else None, None, seed)

    def text(drafter):
        conversation = Conversation(target.new_states())
        ids = []
        for prompt in ([5], [3, 9, 4]):
            ids += [t.id for t in generate_tokens(target, conversation, prompt, policy, drafter, max_tokens=20)]
        return ids

    assert text(drafter) == text(None)
