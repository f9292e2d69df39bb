"""A tiny pair with real acceptance that nobody trained: a target that is nearly a bigram model, drafters that are one.

The target's layers add little to the residual stream, so that its head sees the last token's embedding, and a little of
what came before. DSpark's Markov head and DFlash 2's selector hold that bigram; the rest of the drafters is silent.
"""

import json
import shutil
import sys
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from specmlx.drafters.checkpoint import build
from specmlx.drafters.config import DrafterConfig

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from make_demo.pair import TARGET_CONFIG, new_target  # noqa: E402

# How much the layers say, and how many tokens, from the first one that is no special one, there are to be said.
BRANCHES, WORDS, FIRST = 1.2, 64, 32
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
_TAPS = {"target_layer_ids": [1, 3, 6], "mask_token_id": 3}


def write_bigram(directory: Path, tokenizer: Path) -> Path:
    """Write target, dspark/ and dflash2/ into a new directory, with the tokenizer's files of another one."""
    target = new_target()
    for layer in target.layers:
        mixer = layer.linear_attn.out_proj if layer.is_linear else layer.self_attn.o_proj
        for projection in (layer.mlp.down_proj, mixer):
            projection.weight = projection.weight * BRANCHES
    embedding, head = _bigram(target.config.vocab_size, target.config.hidden_size)
    config = TARGET_CONFIG | {"tie_word_embeddings": False, "draft_model": "dspark"}
    weights = dict(tree_flatten(target.parameters()))
    names = {name.rsplit(".", 2)[-2]: name for name in weights}
    weights[names["embed_tokens"]] = embedding
    weights[names["embed_tokens"].replace("model.embed_tokens", "lm_head")] = head
    _write(directory, config, weights)
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(tokenizer / file, directory)
    for name in ("dspark", "dflash2"):
        _write(directory / name, *_drafter(name, target, embedding, head))
    return directory


def _bigram(vocab: int, hidden: int) -> tuple[mx.array, mx.array]:
    """Embedding and head `[V, D]`: coordinate 0 of each embedding says which tokens can be said at all."""
    mx.random.seed(11)
    embedding, head = mx.random.normal((vocab, hidden)), mx.random.normal((vocab, hidden))
    said = (mx.arange(vocab) >= FIRST) & (mx.arange(vocab) < FIRST + WORDS)
    embedding[:, 0] = 3.0
    head[:, 0] = 0.0
    head = mx.where(said[:, None], head, 0.01 * head)
    head[:, 0] = mx.where(said, 10.0, 0.0)
    return embedding, head


def _drafter(name: str, target, embedding: mx.array, head: mx.array) -> tuple[dict, dict[str, mx.array]]:
    rank = target.config.hidden_size
    sizes = {key: TARGET_CONFIG[key] for key in _SIZES}
    config = sizes | {"model_type": "qwen3", "num_hidden_layers": 1, "rms_norm_eps": 1e-6, "block_size": 8}
    config |= {"max_position_embeddings": 4096, "rope_theta": 10000.0, "tie_word_embeddings": False}
    config["num_target_layers"] = TARGET_CONFIG["num_hidden_layers"]
    if name == "dspark":
        config |= _TAPS | {"architectures": ["Qwen3DSparkModel"], "markov_rank": rank, "markov_head_type": "vanilla"}
        config |= {"enable_confidence_head": False, "confidence_head_with_markov": True}
    else:
        selector = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": rank, "selector_top_k": WORDS}
        config |= {"architectures": ["DFlash2DraftModel"], "is_causal": False, "dflash_config": _TAPS | selector}
    weights = dict(tree_flatten(build(DrafterConfig.from_dict(config), target).model.parameters()))
    for key in weights:
        if key.endswith(("o_proj.weight", "down_proj.weight")):
            weights[key] = mx.zeros_like(weights[key])
    # A slot's row is the mask's embedding then; of it only coordinate 0 stays, which the words' logits have in common.
    row = mx.fast.rms_norm(embedding, None, 1e-6)
    first = (mx.arange(rank) == 0).astype(mx.float32)
    weights["norm.weight"] = first
    if name == "dspark":
        return config, weights | {"markov_head.markov_w1.weight": row, "markov_head.markov_w2.weight": head}
    ones = first[None] / row[_TAPS["mask_token_id"], 0]
    selector = {"predecessor_codebook": row, "successor_codebook": head}
    selector["hidden_projection.weight"] = mx.broadcast_to(ones, (rank, rank))
    return config, weights | {f"candidate_selector.{key}": value for key, value in selector.items()}


def _write(directory: Path, config: dict, weights: dict[str, mx.array]) -> None:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
