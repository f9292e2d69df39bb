"""Tokenizers out of GGUF files: each kind against merges done one by one, as llama.cpp does them."""

import json
import unicodedata
from collections import Counter
from pathlib import Path

import pytest
import regex
from mlx_lm.utils import load_tokenizer

from specmlx.formats.gguf import read_gguf
from specmlx.targets.gguf_tokenizer import write_tokenizer

FILE = Path(__file__).parents[1] / "goldens" / "gguf" / "tokenized.gguf"
METADATA = read_gguf(FILE).metadata
TEXTS = [
    "The quick brown fox doesn't jump over 1234567 lazy dogs; they'LL see. ÄÖÜber HTTPServer iPhone",
    "  two  spaces\n\n\tand a tab, then a line end\r\n   ",
    "Straße, café and cafe\u0301, สวัสดี 12 ½ ٣٤",
    "你好，世界! 🎉 def f(x):\n    return x**2  # it's squared/\n\n",
]
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The patterns that cut a text one after the other, by llama.cpp's names; whether a whole token needs no merges.
KINDS = {
    "qwen2": ([WORDS], False),
    "qwen35": ([QWEN35], False),
    "deepseek-r1-qwen": ([WORDS], False),
    "llama-bpe": ([WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|")], True),
    "tekken": ([TEKKEN], True),
    "gpt-2": ([GPT2], False),
    "smollm": ([r"\p{N}", GPT2], False),
    "refact": ([r"\p{N}", GPT2], False),
}


def cut(pieces: list[str], pattern: str) -> list[str]:
    found = []
    for piece in pieces:
        at = 0
        for match in regex.finditer(pattern, piece):
            found += [piece[at : match.start()], match[0]]
            at = match.end()
        found.append(piece[at:])
    return [piece for piece in found if piece]


def letters() -> dict[int, str]:
    """GPT-2's letter for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def merged(parts: list[str], rank: dict[tuple[str, str], float]) -> list[str]:
    """Merge the pair of the lowest rank, the leftmost first, until there is none."""
    while pairs := [(rank[pair], i) for i, pair in enumerate(zip(parts, parts[1:], strict=False)) if pair in rank]:
        _, i = min(pairs)
        parts = [*parts[:i], parts[i] + parts[i + 1], *parts[i + 2 :]]
    return parts


def written(metadata: dict, folder: Path):
    write_tokenizer(metadata, folder)
    return load_tokenizer(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_a_byte_level_tokenizer_gives_the_ids_of_merges_one_by_one(kind, tmp_path):
    patterns, whole = KINDS[kind]
    # The last one no merges make.
    tokens, kinds = [*METADATA["tokenizer.ggml.tokens"], "Ġlazy"], [*METADATA["tokenizer.ggml.token_type"], 1]
    named = {"pre": kind, "tokens": tokens, "token_type": kinds}
    metadata = METADATA | {f"tokenizer.ggml.{key}": value for key, value in named.items()}
    ids = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    rank = {tuple(pair.split(" ")): i for i, pair in enumerate(metadata["tokenizer.ggml.merges"])}
    letter, tokenizer = letters(), written(metadata, tmp_path)
    for text in TEXTS:
        pieces = [unicodedata.normalize("NFC", text) if kind in ("qwen2", "qwen35") else text]
        for pattern in patterns:
            pieces = cut(pieces, pattern)
        want = []
        for piece in pieces:
            piece = "".join(letter[byte] for byte in piece.encode())
            want += [piece] if whole and piece in ids else merged([*piece], rank)
        assert tokenizer.encode(text, add_special_tokens=False) == [ids[token] for token in want]
    marked = tokenizer.encode("<|im_start|>user<think>", add_special_tokens=False)
    assert marked[0] == ids["<|im_start|>"] and marked[-1] == ids["<think>"]


@pytest.mark.parametrize(("kind", "default"), [("qwen2", False), ("smollm", False), ("llama-bpe", True)])
@pytest.mark.parametrize("asked", [None, True, False])
def test_a_text_begins_with_bos_where_the_file_or_the_kind_says_so(kind, default, asked, tmp_path):
    bos, eos = (METADATA["tokenizer.ggml.tokens"].index(token) for token in ("<|im_start|>", "<|im_end|>"))
    metadata = METADATA | {"tokenizer.ggml.pre": kind, "tokenizer.ggml.bos_token_id": bos}
    del metadata["tokenizer.ggml.add_bos_token"]
    metadata |= {} if asked is None else {f"tokenizer.ggml.add_{end}_token": asked for end in ("bos", "eos")}
    tokenizer = written(metadata, tmp_path)
    ids = tokenizer.encode("Hello")
    plain = tokenizer.encode("Hello", add_special_tokens=False)
    assert ids == [bos] * (default if asked is None else asked) + plain + [eos] * bool(asked)


def pieces() -> dict:
    """SentencePiece's metadata: bytes, the letters of a text, and its most frequent pairs, each with a lower score."""
    text = "▁the▁quick▁brown▁fox▁then▁thinks▁that▁the▁thin▁thing▁is▁in▁there▁" * 3
    words, tokens = [*text], ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *sorted(set(text))]
    first = len(tokens)
    for _ in range(30):
        (one, other), _ = Counter(zip(words, words[1:], strict=False)).most_common(1)[0]
        tokens.append(one + other)
        words = merged(words, {(one, other): 0})
    scores = [0.0] * first + [-float(i) for i in range(len(tokens) - first)]
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259)
    named = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": kinds, "pre": "default"}
    named |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return {f"tokenizer.ggml.{key}": value for key, value in named.items()}


@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_tokenizer_gives_the_ids_of_merges_by_score(prefix, tmp_path):
    metadata = pieces() | {"tokenizer.ggml.add_space_prefix": prefix}
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    ids, tokenizer = {token: i for i, token in enumerate(tokens)}, written(metadata, tmp_path)
    rank = {}
    for token, score in zip(tokens[259:], scores[259:], strict=True):
        rank |= {(token[:i], token[i:]): -score for i in range(1, len(token))}
    for text in ("the thin thing is there", " then  the quick fox", "thé → fox\n", "innovation"):
        found = merged([*("▁" * prefix + text.replace(" ", "▁"))], rank)
        want = [i for token in found for i in ([ids[token]] if token in ids else [3 + b for b in token.encode()])]
        assert tokenizer.encode(text) == [1, *want]
        assert tokenizer.decode(want) == text


def test_a_sentencepiece_tokenizer_needs_its_scores(tmp_path):
    metadata = pieces()
    metadata["tokenizer.ggml.scores"] = metadata["tokenizer.ggml.scores"][:-1]
    with pytest.raises(ValueError, match="tokenizer.ggml.scores has not a score for each token"):
        write_tokenizer(metadata, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"model": "bert"}, "is a 'bert' of kind 'qwen35', which specmlx can't write"),
        ({"pre": "deepseek-llm"}, "of kind 'deepseek-llm'"),
        ({"pre": ["qwen35"]}, "of kind"),
        ({"tokens": None}, "it has no tokenizer.ggml.tokens"),
        ({"tokens": [1, 2]}, "it has no tokenizer.ggml.tokens"),
        ({"tokens": ["a", "a"]}, "has a token twice"),
        ({"merges": ["a"]}, "tokenizer.ggml.merges has 'a', not two parts"),
        ({"token_type": [1]}, "tokenizer.ggml.token_type says not"),
        ({"add_bos_token": True}, "add_bos_token is set, but there is no such token"),
    ],
)
def test_a_tokenizer_that_can_not_be_read_is_refused_in_one_line(changes, word, tmp_path):
    with pytest.raises(ValueError) as error:
        write_tokenizer(METADATA | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}, tmp_path)
    assert word in str(error.value) and "\n" not in str(error.value) and not list(tmp_path.iterdir())


def test_the_files_names_of_its_tokens_are_the_tokenizers(tmp_path):
    write_tokenizer(METADATA | {"tokenizer.ggml.bos_token_id": 3, "tokenizer.ggml.eos_token_id": 10**9}, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["bos_token"] == METADATA["tokenizer.ggml.tokens"][3] and "eos_token" not in config
