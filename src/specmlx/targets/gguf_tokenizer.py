"""A GGUF file's own tokenizer as the files that tokenizers are loaded from."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specmlx.formats.gguf import read_gguf
from specmlx.targets.gguf import gguf_files

NAMES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")

# What precedes the merges, by llama.cpp's name of it (tokenizer.ggml.pre); the patterns are transformers'.
_LETTERS = {"qwen2": r"\p{L}", "qwen35": r"\p{L}\p{M}"}
_CONTROL, _USER_DEFINED = 3, 4


@contextmanager
def tokenizer_files(path: Path) -> Iterator[Path]:
    """A directory with a target's tokenizer: its own, or for a while that of a GGUF file without files beside it.

    Raises ValueError in one line where there is none.
    """
    folder = path if path.is_dir() else path.parent
    if any((folder / name).is_file() for name in NAMES):
        yield folder
        return
    files = gguf_files(path)
    if not files:
        raise ValueError(f"{path} has no tokenizer ({', '.join(NAMES)}): the download may be incomplete")
    with tempfile.TemporaryDirectory() as own:
        try:
            write_tokenizer(read_gguf(files[0]).metadata, Path(own))
        except ValueError as error:
            raise ValueError(
                f"{files[0]} has no tokenizer that can be used ({error}): put the model's tokenizer.json beside it"
            ) from None
        yield Path(own)


def write_tokenizer(metadata: dict[str, Any], folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into a directory.

    Raises ValueError in one line for metadata without a byte-level BPE of Qwen's kind, or with parts that don't fit.
    """
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2" or not isinstance(pre, str) or pre not in _LETTERS:
        known = " or ".join(_LETTERS)
        raise ValueError(
            f"its tokenizer is a {str(kind)[:40]!r} of kind {str(pre)[:40]!r}, not a 'gpt2' of kind {known}"
        )
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    if len(set(tokens)) < len(tokens):
        raise ValueError("tokenizer.ggml.tokens has a token twice")
    merges = [merge.split(" ") for merge in _strings(metadata, "tokenizer.ggml.merges")]
    if bad := next((merge for merge in merges if len(merge) != 2), None):
        raise ValueError(f"tokenizer.ggml.merges has {' '.join(bad)[:80]!r}, not two parts")
    kinds = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise ValueError("tokenizer.ggml.token_type says not of each token what it is")
    if metadata.get("tokenizer.ggml.add_bos_token"):
        raise ValueError("tokenizer.ggml.add_bos_token is set: no tokenizer of Qwen's begins so")
    added = [
        {
            "id": i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kinds[i] == _CONTROL,
        }
        for i, token in enumerate(tokens)
        if kinds[i] in (_CONTROL, _USER_DEFINED)
    ]
    (folder / "tokenizer.json").write_text(
        json.dumps(_tokenizer(tokens, merges, added, _LETTERS[pre])), encoding="utf-8"
    )
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name in ("eos", "padding"):
        i = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if type(i) is int and 0 <= i < len(tokens):
            config["pad_token" if name == "padding" else f"{name}_token"] = tokens[i]
    if isinstance(template := metadata.get("tokenizer.chat_template"), str):
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def _tokenizer(tokens: list[str], merges: list[list[str]], added: list[dict], letters: str) -> dict[str, Any]:
    pattern = (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|\p{{N}}"
        rf"| ?[^\s{letters}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": merges,
        },
    }


def _strings(metadata: dict[str, Any], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise ValueError(f"it has no {key}")
    return value
