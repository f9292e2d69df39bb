"""mlx-lm's models with random weights."""

from importlib import import_module

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

SIZES = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=96,
    rms_norm_eps=1e-5,
    max_position_embeddings=2048,
    rope_theta=10000.0,
)


LFM = dict(
    norm_eps=1e-5,
    conv_bias=False,
    conv_L_cache=3,
    block_dim=64,
    block_ff_dim=96,
    block_multiple_of=8,
    block_ffn_dim_multiplier=1.0,
    block_auto_adjust_ff_dim=False,
    full_attn_idxs=[1, 3],
)


WINDOW = 12


MODELS = {
    "llama": {},
    "qwen3": dict(tie_word_embeddings=False),
    "gemma3_text": dict(sliding_window=WINDOW, sliding_window_pattern=2, query_pre_attn_scalar=16),
    "gemma4_text": dict(
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
        global_head_dim=32,
        num_kv_shared_layers=1,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=96,
        final_logit_softcapping=None,
    ),
    "lfm2": LFM,
}


def random_lm(model_type: str, seed: int = 0, **changes) -> nn.Module:
    """mlx-lm's model of that type with random weights and a vocabulary of 96."""
    module = import_module(f"mlx_lm.models.{model_type}")
    mx.random.seed(seed)
    config = {"model_type": model_type, **SIZES, **MODELS.get(model_type, {}), **changes}
    model = module.Model(module.ModelArgs.from_dict(config))
    model.load_weights([(k, v if v.ndim == 1 else mx.random.normal(v.shape) * 0.2) for k, v in flat(model)])
    model.eval()
    mx.eval(model.parameters())
    return model


def flat(model: nn.Module) -> list[tuple[str, mx.array]]:
    return tree_flatten(model.parameters())
