"""A GGUF file's own tokenizer as the files that tokenizers are loaded from."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specmlx.formats.gguf import read_gguf
from specmlx.formats.header import check_small_files
from specmlx.targets.gguf import gguf_files

NAMES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")

_SHORT = {"unknown": "unk", "padding": "pad"}
_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6
# Of a token that is made of others, in characters: bounds the time that a stranger's file takes.
_LONGEST = 256
_NUMBERS = r"\p{N}"


def _words(letters: str = r"\p{L}", numbers: str = _NUMBERS) -> str:
    return (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|{numbers}"
        rf"| ?[^\s{letters}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _Pre:
    """What precedes the merges: the pattern of a word (None: GPT-2's own), whether digits part before it, NFC; whether
    a word that is a token needs no merges, and whether a text begins with bos where the file doesn't say."""

    pattern: str | None = None
    digits: bool = False
    composed: bool = False
    whole: bool = False
    bos: bool = False


# By llama.cpp's name of it (tokenizer.ggml.pre); the patterns are transformers'.
_LLAMA3 = _Pre(_words(numbers=r"\p{N}{1,3}"), whole=True, bos=True)
_PRE = {
    "qwen2": _Pre(_words(), composed=True),
    "qwen35": _Pre(_words(r"\p{L}\p{M}"), composed=True),
    "deepseek-r1-qwen": _Pre(_words()),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "tekken": _Pre(_CASED, whole=True, bos=True),
    "gpt-2": _Pre(),
    "smollm": _Pre(digits=True),
    "starcoder": _Pre(digits=True),
    "refact": _Pre(digits=True),
}


@contextmanager
def tokenizer_files(path: Path) -> Iterator[Path]:
    """A directory with a target's tokenizer: its own, or for a while that of a GGUF file without files beside it.

    Raises ValueError in one line where there is none.
    """
    folder = path if path.is_dir() else path.parent
    if any((folder / name).exists() for name in NAMES):
        check_small_files(folder)
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

    Raises ValueError in one line for metadata of a kind that is not known, or with parts that don't fit.
    """
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "llama" and (kind != "gpt2" or not isinstance(pre, str) or pre not in _PRE):
        what = f"a {str(kind)[:40]!r} of kind {str(pre)[:40]!r}"
        raise ValueError(f"its tokenizer is {what}, which specmlx can't write")
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    if len(set(tokens)) < len(tokens):
        raise ValueError("tokenizer.ggml.tokens has a token twice")
    kinds = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise ValueError("tokenizer.ggml.token_type says not of each token what it is")
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
    named = {}
    for name in ("bos", "eos", "unknown", "padding"):
        i = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if type(i) is int and 0 <= i < len(tokens):
            named[name] = tokens[i]
    parts = _pieces(metadata, tokens, kinds, named) if kind == "llama" else _byte_level(metadata, tokens, _PRE[pre])
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "post_processor": _ends(metadata, tokens, named, kind == "llama" or _PRE[pre].bos),
        **parts,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {
        f"{({'unknown': 'unk', 'padding': 'pad'}).get(name, name)}_token": token for name, token in named.items()
    }
    if isinstance(template := metadata.get("tokenizer.chat_template"), str):
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def _ends(metadata: dict[str, Any], tokens: list[str], named: dict[str, str], bos: bool) -> dict[str, Any] | None:
    """What stands around a text: the tokens that add_bos_token and add_eos_token ask for."""
    asked = {"bos": metadata.get("tokenizer.ggml.add_bos_token", bos)}
    asked["eos"] = metadata.get("tokenizer.ggml.add_eos_token", False)
    if missing := next((name for name, wanted in asked.items() if wanted and name not in named), None):
        raise ValueError(f"tokenizer.ggml.add_{missing}_token is set, but there is no such token")
    ends = {name: {"SpecialToken": {"id": named[name], "type_id": 0}} for name, wanted in asked.items() if wanted}
    if not ends:
        return None

    def around(*texts: str) -> list[dict[str, Any]]:
        found = []
        for i, text in enumerate(texts):
            own = {"Sequence": {"id": text, "type_id": i}}
            found += [part for part in (ends.get("bos"), own, ends.get("eos")) if part]
        return found

    special = {token: {"id": token, "ids": [tokens.index(token)], "tokens": [token]} for token in map(named.get, ends)}
    return {"type": "TemplateProcessing", "single": around("A"), "pair": around("A", "B"), "special_tokens": special}


def _model(tokens: list[str], merges: list[list[str]], **changes: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": "",
        "end_of_word_suffix": "",
        "fuse_unk": False,
        "byte_fallback": False,
        "vocab": {token: i for i, token in enumerate(tokens)},
        "merges": merges,
        **changes,
    }


def _byte_level(metadata: dict[str, Any], tokens: list[str], pre: _Pre) -> dict[str, Any]:
    merges = [merge.split(" ") for merge in _strings(metadata, "tokenizer.ggml.merges")]
    if bad := next((merge for merge in merges if len(merge) != 2), None):
        raise ValueError(f"tokenizer.ggml.merges has {' '.join(bad)[:80]!r}, not two parts")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    steps: list[dict[str, Any]] = [{"type": "Digits", "individual_digits": True}] if pre.digits else []
    if pre.pattern is not None:
        steps.append({"type": "Split", "pattern": {"Regex": pre.pattern}, "behavior": "Isolated", "invert": False})
    steps.append(byte_level | {"use_regex": pre.pattern is None})
    return {
        "normalizer": {"type": "NFC"} if pre.composed else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": byte_level | {"use_regex": False},
        "model": _model(tokens, merges, ignore_merges=pre.whole),
    }


def _pieces(metadata: dict[str, Any], tokens: list[str], kinds: list, named: dict[str, str]) -> dict[str, Any]:
    """SentencePiece's BPE, whose merges follow from the tokens' scores (transformers' way)."""
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ValueError("tokenizer.ggml.scores has not a score for each token")
    ids = {token: i for i, token in enumerate(tokens)}
    found = []
    for token, kind, score in zip(tokens, kinds, scores, strict=True):
        if kind in (_CONTROL, _USER_DEFINED, _BYTE) or len(token) > _LONGEST:
            continue
        pairs = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in ids and token[i:] in ids]
        found += [(-score, ids[one], ids[other], [one, other]) for one, other in pairs]
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    decoders = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}]
    decoders += [{"type": "Fuse"}] + [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * bool(prefix)
    normalizers = [{"type": "Prepend", "prepend": "▁"}] * bool(prefix) + [space]
    merges = [pair for *_, pair in sorted(found, key=lambda item: item[:3])]
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _model(tokens, merges, unk_token=named.get("unknown"), fuse_unk=True, byte_fallback=True),
    }


def _strings(metadata: dict[str, Any], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise ValueError(f"it has no {key}")
    return value
