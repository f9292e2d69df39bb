"""Tiny random hybrids for tests, ours and mlx-lm's with the same weights, and what their states hold."""

import random
from copy import deepcopy
from importlib import import_module

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from specmlx.cache.kv import KV
from specmlx.cache.layers import LayerStates
from specmlx.decoding import loop
from specmlx.decoding.prefill import prefill
from specmlx.decoding.stats import Stats
from specmlx.kernels import dispatch
from specmlx.targets.checkpoint import cast
from specmlx.targets.config import HybridConfig
from specmlx.targets.hybrid import Model

TINY = {
    "model_type": "qwen3_5",
    "architectures": ["Qwen3_5ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": 96,
    "max_position_embeddings": 4096,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}

EXPERTS = {
    "model_type": "qwen3_5_moe",
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
NEXT = EXPERTS | {
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "decoder_sparse_step": 2,
    "mlp_only_layers": [3],
    "norm_topk_prob": True,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "rope_scaling": None,
}

# What the tests of the API run: two layers of each kind, and the vocabulary of `small_tokenizer`.
SMALL = dict(num_hidden_layers=4, full_attention_interval=2, vocab_size=282)


def tiny(
    seed: int = 0, dtype: mx.Dtype = mx.float32, bits: int | None = None, group_size: int = 32, **changes
) -> Model:
    """A random hybrid whose heads' decays span .9 to .9999, so that stale states are seen."""
    mx.random.seed(seed)
    model = Model(HybridConfig.from_dict(TINY | changes))
    weights = []
    for name, value in tree_flatten(model.parameters()):
        if name.endswith("A_log"):
            value = mx.log(-mx.log(mx.linspace(0.9, 0.9999, value.size)))
        elif name.endswith("dt_bias"):
            value = mx.zeros_like(value) + 0.5
        elif value.ndim == 1:
            value = 1 + 0.1 * mx.random.normal(value.shape)
        elif "in_proj_a" in name:
            value = 0.05 * mx.random.normal(value.shape)
        weights.append((name, value))
    model.update(tree_unflatten(weights))
    if bits is not None:
        nn.quantize(model, group_size=group_size, bits=bits)
    cast(model, dtype)
    model.eval()
    mx.eval(model.parameters())
    return model


def mlx_lm_twin(model: Model, **changes):
    """mlx-lm's own model of the same type with the very arrays of `model`."""
    # A copy, since mlx-lm renames a key of rope_parameters in place.
    config = deepcopy(TINY | changes)
    module = import_module(f"mlx_lm.models.{config['model_type']}")
    twin = module.Model(module.ModelArgs.from_dict(config))
    if bits := next((m.bits for _, m in model.named_modules() if isinstance(m, nn.QuantizedLinear)), None):
        nn.quantize(twin, group_size=32, bits=bits)
    nested = "language_model" in twin
    weights = [(k if nested else k.removeprefix("language_model."), v) for k, v in tree_flatten(model.parameters())]
    twin.load_weights(weights, strict=True)
    twin.eval()
    return twin


def generate_tokens(
    target,
    conversation,
    prompt,
    policy,
    drafter=None,
    num_draft_tokens=None,
    *,
    lookahead=True,
    decide=None,
    stop_tokens=(),
    max_tokens=-1,
    stats=None,
    prefill_step_size=2048,
    progress=None,
    checkpoints=None,
):
    """Tokens that continue a conversation, in a batch of its own."""
    batch = loop.Batch(target, drafter, num_draft_tokens, lookahead=lookahead, decide=decide)
    stats = Stats() if stats is None else stats
    sequence = loop.Sequence(conversation, policy, list(prompt), stop_tokens, max_tokens, stats)
    later = batch.choose(1) == 0
    for step in prefill(target, conversation, prompt, drafter, prefill_step_size, checkpoints, later):
        if progress:
            progress(step, len(prompt))
        conversation.check(sequence.owner)
    if progress:
        progress(len(prompt), len(prompt))
    batch.join([sequence])
    while not sequence.over:
        for _, token in batch.round():
            if token is None:
                raise sequence.error
            yield token


def tokens(seed: int, n: int, vocab: int = 96) -> mx.array:
    """`[1, n]` seeded random int32 ids."""
    return mx.random.randint(0, vocab, (1, n), key=mx.random.key(seed)).astype(mx.int32)


def prefilled(model: Model, ids: mx.array, **options) -> LayerStates:
    """States after a prefill of `ids` `[B, L]`."""
    states = model.new_states(ids.shape[0])
    for _ in model.prefill(states, ids, **options):
        pass
    return states


def in_rounds(model: Model, states: LayerStates, ids: list[int], seed: int, most: int = 9) -> list[mx.array]:
    """Logits `[V]` of ids that go in by passes of random width, as far as the rows of each pass are right."""
    rng = random.Random(seed)
    logits = []
    while len(logits) < len(ids):
        T = rng.randint(1, most)
        right = ids[len(logits) :][: rng.randint(0, T)]
        rows = right + [rng.randrange(model.vocab_size) for _ in range(T - len(right))]
        verified = model.verify(states, mx.array([rows], dtype=mx.int32))
        states.evaluate()
        if right or rng.random() < 0.5:
            states.commit(len(right))
        else:
            states.abort()
        logits += list(verified.logits[0, : len(right)])
    return logits


def serve(patch, factory, *operators: str) -> None:
    """Let the factory's kernels run these operators, or all; mlx the others, and all without a factory."""
    patch.setattr(dispatch, "metal_factory", lambda: factory)
    patch.setattr(dispatch, "serves", lambda operator, key: not operators or operator in operators)


def leaves(states: LayerStates, lane: int = 0) -> list[mx.array]:
    """Everything that the committed rows of one lane left: S, conv inputs, keys and values up to its length."""
    length = int(mx.broadcast_to(mx.array(states.length), (states.batch,))[lane].item())
    found = []
    for layer in states.folded():
        if isinstance(layer, KV):
            found += [x[lane, :, :length] for x in layer]
        elif layer is not None:
            found += [layer.S[lane], layer.conv[lane]]
    return found


def stock_leaves(caches: list) -> list[mx.array]:
    """The same of mlx-lm's own caches."""
    found = []
    for cache in caches:
        if hasattr(cache, "keys"):
            found += [x[0, :, : cache.offset] for x in (cache.keys, cache.values)]
        else:
            found += [cache[1][0], cache[0][0]]
    return found


def by_steps(model, caches: list, ids: list[int]) -> list[mx.array]:
    """Logits `[V]` after each of the ids, which go one by one through an mlx-lm model and its caches."""
    logits = []
    for token in ids:
        logits.append(model(mx.array([[token]], dtype=mx.int32), cache=caches)[0, -1])
        mx.eval(logits[-1])
    return logits


def same_bits(a: list[mx.array], b: list[mx.array]) -> bool:
    return len(a) == len(b) and all(
        x.dtype == y.dtype and mx.array_equal(x, y).item() for x, y in zip(a, b, strict=True)
    )


def small_tokenizer(folder):
    """A byte-level BPE of 282 tokens by mlx-lm's loader: emoji and Chinese characters take several tokens."""
    from mlx_lm.utils import load_tokenizer
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=282,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["the quick brown fox jumps over the lazy dog and the cat"] * 3, trainer)
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>").save_pretrained(str(folder))
    return load_tokenizer(folder)


def collect(responses):
    """The whole text, all ids and the last response of a stream, once it is seen that they fit together."""
    found = list(responses)
    assert all(r.finish_reason is None for r in found[:-1]) and found[-1].finish_reason
    assert [r.generation_tokens for r in found] == list(range(1, len(found) + 1))
    assert [r.stats.generation_tokens for r in found] == [r.generation_tokens for r in found]
    return "".join(r.text for r in found), [r.token for r in found], found[-1]


def plain_ids(model, prompts: list[list[int]], count: int):
    """A conversation by the model's own passes, one token a pass: what each turn gave, and the states."""
    states, pending, turns = model.new_states(), [], []
    for prompt in prompts:
        ids = [*pending, *prompt]
        for _ in model.prefill(states, mx.array([ids[:-1]], dtype=mx.int32)):
            pass
        anchor, given = ids[-1], []
        for _ in range(count):
            logits = model.verify(states, mx.array([[anchor]], dtype=mx.int32)).logits[0, -1]
            states.evaluate()
            states.commit(1)
            anchor = logits.argmax().item()
            given.append(anchor)
        pending = [anchor]
        turns.append(given)
    return turns, states


def offsets(caches: list) -> list[int]:
    """Rows that mlx-lm's key caches hold."""
    return [cache.offset for cache in caches if hasattr(cache, "offset")]
