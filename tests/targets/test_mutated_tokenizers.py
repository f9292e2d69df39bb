"""Tokenizers that were changed: each ends in one line, or encodes as transformers does by itself."""

import json
import random
import resource
import shutil

import pytest
from demo_kit import write_model
from mutation_kit import mutated, one_line
from transformers import AutoTokenizer

from specmlx.cli.template import render
from specmlx.generation.generate import generate
from specmlx.loading.load import load

TEXT = "Count from 3 to 7, then say \x00 世🙂.\n"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_changed_tokenizer_is_refused_or_encodes_as_transformers_has_it(name, whole, tmp_path):
    rng, outcomes = random.Random(4), set()
    path = shutil.copytree(whole, tmp_path / "copy")
    before = json.loads((path / name).read_text())
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for n in range(40):
        # Most of the file is its vocabulary: what else there is counts as much.
        changed = dict(before)
        key = rng.choice([*before])
        changed[key] = mutated(rng, before[key])
        text = json.dumps(changed) if n % 15 else rng.choice(["", "{", "[" * 9000, "null", "1" * 9000])
        (path / name).write_text(text)

        def encodes():
            model, tokenizer = load(path, draft_model=None)
            ids = tokenizer.encode(TEXT, add_special_tokens=False)
            assert ids == AutoTokenizer.from_pretrained(path).encode(TEXT, add_special_tokens=False)
            generate(model, tokenizer, TEXT, max_tokens=2)
            # What a template raises is one line as well.
            return tokenizer.has_chat_template and render(tokenizer, [{"role": "user", "content": "x"}], {})

        outcomes.add(one_line(encodes) is None)
    assert outcomes == {True, False}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held < 300 << 10
