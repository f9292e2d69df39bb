"""A small language model as drafter: against the model run alone, through rejections, and in the loop."""

import json

import mlx.core as mx
import pytest
from drafter_kit import Greedy, write_drafter
from mlx.utils import tree_flatten
from mlx_lm.models import gemma3_text, llama, qwen3_5
from rig import TINY, generate_tokens, tiny

from specmlx.cache.conversation import Conversation
from specmlx.decoding.policy import Policy
from specmlx.decoding.sampling import make_sampler
from specmlx.drafters.pairing import check_pair
from specmlx.drafters.proposal import Drafter
from specmlx.drafters.small_lm import SmallLM
from specmlx.loading.load import load_drafter

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": 96,
}


def small(vocab: int = 96, seed: int = 1) -> llama.Model:
    mx.random.seed(seed)
    return llama.Model(llama.ModelArgs.from_dict({**LLAMA, "vocab_size": vocab}))


def alone(model: llama.Model, text: list[int], width: int) -> list[int]:
    """The model's own greedy continuation, run over the whole text for every token."""
    text = list(text)
    for _ in range(width):
        text.append(mx.argmax(model(mx.array([text]))[0, -1, :96]).item())
    return text[-width:]


def anchor(token: int) -> mx.array:
    return mx.array([token], dtype=mx.int32)


@pytest.mark.parametrize("unread", [False, True])
def test_drafts_are_the_models_own_whatever_was_accepted_before(unread):
    model, text = small(), [5, 9, 3]
    drafter = SmallLM(model, 96, 4)
    context = drafter.new_context()
    drafter.observe(context, mx.array([text[:-1]], dtype=mx.int32), None, 2)
    for accepted in (0, 4, 2, 1, 4, 4, 0, 3):
        wanted = alone(model, text, 4)
        drafts = drafter.propose(context, anchor(text[-1]), 4, Greedy()).tokens[0].tolist()
        assert drafts == wanted
        rows = mx.array([[text[-1], *drafts]], dtype=mx.int32)
        count = mx.array([accepted + 1], dtype=mx.int32) if unread else accepted + 1
        drafter.observe(context, rows, None, count)
        text += [*drafts[:accepted], (drafts[accepted] + 1) % 96 if accepted < 4 else 7]


def test_rows_that_are_taken_back_and_proposals_that_are_dropped_leave_no_trace():
    model = small()
    drafter = SmallLM(model, 96, 4)
    context = drafter.new_context()
    drafter.observe(context, mx.array([[5, 9, 3]], dtype=mx.int32), None, 3)
    drafter.propose(context, anchor(8), 4, Greedy())
    drafter.observe(context, mx.array([[1, 2, 4, 4]], dtype=mx.int32), None, 4)
    drafter.propose(context, anchor(8), 4, Greedy())
    context.settle(2)
    assert context.ids == [5, 9, 3, 1, 2]
    assert drafter.propose(context, anchor(6), 4, Greedy()).tokens[0].tolist() == alone(model, [5, 9, 3, 1, 2, 6], 4)


@pytest.mark.parametrize("length", [262, 326])
def test_drafts_past_a_sliding_window_are_the_models_own_whatever_was_taken_back(length):
    sizes = dict(sliding_window=12, sliding_window_pattern=2, head_dim=16, num_key_value_heads=1)
    sizes |= dict(query_pre_attn_scalar=16, model_type="gemma3_text")
    mx.random.seed(2)
    model = gemma3_text.Model(gemma3_text.ModelArgs.from_dict({**LLAMA, **sizes}))
    drafter, text = SmallLM(model, 96, 4), [i * i % 89 for i in range(length)]
    context = drafter.new_context()
    drafter.observe(context, mx.array([text[:-1]], dtype=mx.int32), None, len(text) - 1)
    for accepted in (0, 4, 2, 1) * 2:
        drafts = drafter.propose(context, anchor(text[-1]), 4, Greedy()).tokens[0].tolist()
        own = mx.argmax(model(mx.array([text + drafts]))[0, len(text) - 1 : -1], axis=-1)
        assert drafts == own.tolist()
        # A round that is dropped, and this one.
        drafter.observe(context, mx.array([[5] * 16], dtype=mx.int32), None, 16)
        drafter.propose(context, anchor(1), 4, Greedy())
        context.settle(0)
        drafter.observe(context, mx.array([[text[-1], *drafts]], dtype=mx.int32), None, accepted + 1)
        text += [*drafts[:accepted], (drafts[accepted] + 1) % 96 if accepted < 4 else 7]
    context.ids = text = text[:50]
    assert drafter.propose(context, anchor(9), 4, Greedy()).tokens[0].tolist() == alone(model, [*text, 9], 4)


def test_a_long_prompt_is_run_in_parts():
    model = small()
    drafter = SmallLM(model, 96, 2)
    text = [i * i % 89 for i in range(1300)]
    context = drafter.new_context()
    for start in range(0, 1299, 700):
        part = mx.array([text[start : min(start + 700, 1299)]], dtype=mx.int32)
        drafter.observe(context, part, None, part.shape[1])
    assert drafter.propose(context, anchor(text[-1]), 2, Greedy()).tokens[0].tolist() == alone(model, text, 2)


@pytest.mark.parametrize("vocab", [80, 96, 128])
def test_tables_that_are_padded_differently_draft_ids_of_the_target(vocab):
    drafter, policy = SmallLM(small(vocab), 96), Policy(make_sampler(temp=1.0)).at(3)
    context = drafter.new_context()
    drafter.observe(context, mx.array([[5]], dtype=mx.int32), None, 1)
    proposal = drafter.propose(context, anchor(7), 3, policy)
    assert proposal.q.shape == (1, 3, 96)
    assert mx.allclose(proposal.q.sum(axis=-1), mx.ones((1, 3))).item()
    assert mx.all(proposal.tokens < min(vocab, 96)).item()


@pytest.mark.parametrize("seed", [None, 5])
def test_text_is_the_plain_text(seed):
    target = tiny(3)
    policy = Policy(make_sampler(temp=0.7) if seed else None, None, seed)

    def text(drafter):
        conversation, ids = Conversation(target.new_states()), []
        for prompt in ([3, 9], [4, 4, 1]):
            ids += [t.id for t in generate_tokens(target, conversation, prompt, policy, drafter, max_tokens=15)]
        return ids

    assert text(SmallLM(small(), 96)) == text(None)


# Files


def tokenizer(*tokens: str) -> dict:
    vocabulary = {token: i for i, token in enumerate(tokens)}
    return {"model": {"type": "BPE", "vocab": vocabulary}, "added_tokens": [{"content": "<end>", "id": len(tokens)}]}


def directory(path, config: dict, weights: dict, tokens: dict | None = None):
    write_drafter(path, config, weights)
    if tokens:
        (path / "tokenizer.json").write_text(json.dumps(tokens))
    return path


def test_a_directory_loads_where_its_tokens_are_the_targets(tmp_path):
    weights, target = dict(tree_flatten(small().parameters())), tiny(3)
    target.directory = directory(tmp_path / "target", TINY, {}, tokenizer("a", "b"))
    same = directory(tmp_path / "same", LLAMA, weights, tokenizer("a", "b"))
    drafter = load_drafter(str(same), target)
    assert isinstance(drafter, SmallLM) and isinstance(drafter, Drafter)
    assert check_pair(target.config, LLAMA) == []
    other = directory(tmp_path / "other", LLAMA, weights, tokenizer("b", "a"))
    with pytest.raises(ValueError, match="has other tokens than the target: 'b' is 0 there, 1 here"):
        load_drafter(str(other), target)
    unknown = directory(tmp_path / "unknown", LLAMA, weights)
    assert load_drafter(str(unknown), target).vocab_size == 96
    larger = dict(tree_flatten(small(128).parameters()))
    unknown = directory(tmp_path / "larger", {**LLAMA, "vocab_size": 128}, larger)
    with pytest.raises(ValueError, match=r"has 128 tokens, the target 96, and there is no tokenizer.json"):
        load_drafter(str(unknown), target)


def test_a_recurrent_model_and_a_batch_are_refused(tmp_path):
    target = tiny(3)
    with pytest.raises(ValueError, match="qwen3_5 has recurrent layers"):
        load_drafter(str(directory(tmp_path, TINY, {})), target)
    (reason,) = check_pair(target.config, TINY)
    assert "recurrent layers" in reason
    hybrid = qwen3_5.Model(qwen3_5.ModelArgs.from_dict({"model_type": "qwen3_5", "text_config": TINY}))
    with pytest.raises(ValueError, match="caches that can't be trimmed"):
        SmallLM(hybrid, 96)
    with pytest.raises(ValueError, match="one conversation at a time, not 2"):
        SmallLM(small(), 96).new_context(2)
