"""The demo pair as a model directory like any other, which mlx_lm reads too."""

import json
import shutil
from itertools import islice
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from specmlx.demo.tasks import held_out_examples, training_examples
from specmlx.drafters.settings import FREQUENCIES
from specmlx.formats.atomic import whole_directory
from specmlx.formats.checkpoint import read_config
from specmlx.loading.load import load, resolve
from specmlx.loading.resolve import DEMO_DRAFTERS

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", FREQUENCIES)
_QUESTIONS_PER_KIND = 4
_TRAINING_ROWS = 3000


def write_demo(directory: str | Path, dtype: str = "float32", bits: int | None = None, group_size: int = 64) -> Path:
    """Write the demo target, its drafters (a folder each; dspark/ is the default) and held-out prompts.

    Args:
        directory: new or empty.
        dtype: float32 (what the demo is loaded as), float16 or bfloat16.
        bits: quantize the target's matrices in groups of `group_size`, as mlx_lm does; None keeps them whole.

    Returns the directory. Raises ValueError, before anything is written, where it holds files or values can't be
    honoured.
    """
    directory = Path(directory).expanduser()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory} is not an empty directory: name a new one")
    model, _ = load("demo", draft_model=None, dtype=dtype)
    config = read_config(resolve("demo"))
    drafters = {name: _drafter(name, dtype) for name in DEMO_DRAFTERS}
    config["draft_model"] = "dspark"
    if bits is not None:
        try:
            nn.quantize(model, group_size=group_size, bits=bits)
        except ValueError as error:
            raise ValueError(f"can't quantize to {bits} bits in groups of {group_size}: {error}") from None
        config["quantization"] = {"group_size": group_size, "bits": bits, "mode": "affine"}
    with whole_directory(directory) as partial:
        _write(partial, config, dict(tree_flatten(model.parameters())))
        for name in _TOKENIZER:
            if (file := resolve("demo") / name).is_file():
                shutil.copy(file, partial)
        for name, (drafter_config, weights) in drafters.items():
            _write(partial / name, drafter_config, weights)
        questions = [example.question for example in held_out_examples(_QUESTIONS_PER_KIND)]
        (partial / "prompts.txt").write_text("\n".join(questions) + "\n", encoding="utf-8")
        rows = [{"prompt": e.question, "category": e.kind} for e in islice(training_examples("export"), _TRAINING_ROWS)]
        (partial / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return directory


def _drafter(name: str, dtype: str) -> tuple[dict, dict[str, mx.array]]:
    path = resolve(f"demo/{name}")
    weights = mx.load(str(path / "model.safetensors"))
    return read_config(path), {key: value.astype(getattr(mx, dtype)) for key, value in weights.items()}


def _write(directory: Path, config: dict, weights: dict[str, mx.array]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
