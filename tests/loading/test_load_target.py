"""Checkpoints on disk: what mlx-lm wrote, what Hugging Face publishes, adapters, and files that are no target."""

import json
import threading
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters
from mlx_lm.utils import load_model, quantize_model, save_config, save_model
from rig import TINY, by_steps, mlx_lm_twin, prefilled, same_bits, tiny, tokens

from specmlx.targets.checkpoint import load_target

SMALL = TINY | {"num_hidden_layers": 4}
IDS = [3, 1, 4, 1, 5, 9]


def write(path: Path, dtype: mx.Dtype = mx.bfloat16, quantization: dict | None = None, **changes) -> Path:
    """A checkpoint by mlx-lm's own writers."""
    config = json.loads(json.dumps(SMALL | changes))
    twin = mlx_lm_twin(tiny(0, dtype, **config), **config)
    if quantization:
        twin, config = quantize_model(twin, config, **quantization)
    save_model(path, twin)
    save_config(config, path / "config.json")
    return path


def logits(model) -> list[mx.array]:
    """Ours, all rows in one pass."""
    return list(model.verify(model.new_states(), mx.array([IDS], dtype=mx.int32)).logits[0])


def mlx_lm_logits(path: Path, adapter_path: Path | None = None) -> list[mx.array]:
    model, _ = load_model(path)
    if adapter_path:
        model = load_adapters(model, str(adapter_path))
        model.eval()
    return by_steps(model, model.make_cache(), IDS)


def edit(path: Path, **changes) -> None:
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(config))


def mixed(path: str, module) -> bool | dict:
    """Per-layer overrides as mlx-lm's mixed recipes have them."""
    if "in_proj_a" in path or "in_proj_b" in path:
        return False
    return {"group_size": 64, "bits": 8, "mode": "affine"} if "down_proj" in path else True


@pytest.mark.linux_bits
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": mx.float32},
        {"dtype": mx.bfloat16},
        {"tie_word_embeddings": True},
        *({"quantization": {"group_size": 32, "bits": bits}} for bits in (2, 3, 4, 5, 6, 8)),
        {"quantization": {"group_size": 32, "bits": 4}, "tie_word_embeddings": True},
        {"quantization": {"group_size": 32, "bits": 4, "quant_predicate": mixed}},
        {"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}},
        {"quantization": {"group_size": 32, "bits": 8, "mode": "mxfp8"}},
        {"quantization": {"group_size": 16, "bits": 4, "mode": "nvfp4"}},
    ],
    ids=lambda options: "-".join(str(v) for v in options.values()).replace(" ", "")[:60],
)
def test_what_mlx_lm_writes_gives_mlx_lms_logits(options, tmp_path):
    path = write(tmp_path, **options)
    assert same_bits(logits(load_target(path)[0]), mlx_lm_logits(path))


def publish(path: Path, shards: int = 1) -> Path:
    """A raw Hugging Face checkpoint: vision and MTP weights too, convs [C, 1, K], norms less one."""
    published = {"model.visual.blocks.0.norm1.weight": mx.zeros(8), "mtp.norm.weight": mx.zeros(8)}
    for name, value in tree_flatten(tiny(0, mx.bfloat16, **SMALL).parameters()):
        if name.endswith("conv1d.weight"):
            value = value.moveaxis(1, 2)
        elif name.endswith("norm.weight") and "linear_attn" not in name:
            value = value - 1
        name = name.removeprefix("language_model.model.")
        published[name.removeprefix("language_model.") if "lm_head" in name else f"model.language_model.{name}"] = value
    names = sorted(published)
    for i in range(shards):
        part = {name: published[name] for name in names[i::shards]}
        mx.save_safetensors(str(path / f"model-{i + 1:05}-of-{shards:05}.safetensors"), part, {"format": "pt"})
    text = {k: v for k, v in SMALL.items() if k not in ("model_type", "architectures")}
    config = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.linux_bits
@pytest.mark.parametrize("shards", [1, 3])
def test_what_hugging_face_publishes_gives_mlx_lms_logits(shards, tmp_path):
    path = publish(tmp_path, shards)
    ours = logits(load_target(path)[0])
    assert ours[0].dtype == mx.bfloat16
    assert same_bits(ours, mlx_lm_logits(path))


@pytest.mark.linux_bits
@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("quantization", [None, {"group_size": 32, "bits": 4}])
def test_an_adapter_gives_the_logits_that_it_gives_mlx_lm(kind, quantization, tmp_path):
    path = write(tmp_path / "model", mx.float32, quantization)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    parameters = {"rank": 4, "scale": 2.0, "dropout": 0.5}
    settings = {"fine_tune_type": kind, "num_layers": 3, "lora_parameters": parameters}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    trained, _ = load_model(path)
    trained.freeze()
    linear_to_lora_layers(trained, 3, parameters, use_dora=kind == "dora")
    weights = {
        name: 0.1 * mx.random.normal(w.shape) if name.endswith("lora_b") else w
        for name, w in tree_flatten(trained.trainable_parameters())
    }
    mx.save_safetensors(str(adapter / "adapters.safetensors"), weights)

    ours = logits(load_target(path, adapter_path=str(adapter))[0])
    assert same_bits(ours, mlx_lm_logits(path, adapter))
    assert not same_bits(ours, logits(load_target(path)[0]))


def test_a_dtype_overrides_the_files_but_not_the_decays(tmp_path):
    path = write(tmp_path, mx.bfloat16, {"group_size": 32, "bits": 4})
    model, _ = load_target(path, dtype=mx.float32)
    assert {value.dtype for _, value in tree_flatten(model.parameters())} == {mx.uint32, mx.float32}
    assert logits(model)[0].dtype == mx.float32
    half, _ = load_target(path, dtype=mx.float16)
    assert half.layers[0].linear_attn.A_log.dtype == mx.float32
    assert half.layers[0].linear_attn.dt_bias.dtype == mx.float16


def test_a_loaded_model_runs_in_another_thread_with_any_rope(tmp_path):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    path = write(tmp_path, mx.float32, rope_parameters=SMALL["rope_parameters"] | yarn)
    model, _ = load_target(path)
    ids = tokens(1, 80)
    mx.eval(ids)
    states, failed = model.new_states(), []

    def work():
        try:
            list(model.prefill(states, ids))
            model.verify(states, mx.array([IDS], dtype=mx.int32))
            states.evaluate()
            states.commit(2)
        except RuntimeError as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failed
    assert prefilled(model, ids).length == 80 and states.length == 82


def drop(path: Path, name: str) -> None:
    weights = mx.load(str(path / "model.safetensors"))
    del weights[name]
    mx.save_safetensors(str(path / "model.safetensors"), weights)


def add(path: Path, name: str, shape: tuple[int, ...]) -> None:
    weights = mx.load(str(path / "model.safetensors")) | {name: mx.zeros(shape)}
    mx.save_safetensors(str(path / "model.safetensors"), weights)


def cut(path: Path, share: float) -> None:
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: int(share * len(data))])


def only(path: Path, name: str) -> None:
    (path / "model.safetensors.index.json").unlink()
    (path / "model.safetensors").rename(path / name)


NORM = "language_model.model.norm.weight"
WRONG = {
    "no config": (lambda path: (path / "config.json").unlink(), "config.json"),
    "config is no JSON": (lambda path: (path / "config.json").write_text("{"), "JSON"),
    "config is a list": (lambda path: (path / "config.json").write_text("[]"), "list"),
    "empty config": (lambda path: (path / "config.json").write_text("{}"), "model_type None"),
    "no model of mlx-lm": (lambda path: edit(path, model_type="nollama"), "nollama"),
    "experts without sizes": (lambda path: edit(path, num_experts=4), "num_experts_per_tok"),
    "a drafter": (lambda path: edit(path, architectures=["DFlashDraftModel"]), "draft_model"),
    "quantization says too little": (lambda path: edit(path, quantization={"bits": 4}), "config.json lacks group_size"),
    "bits are words": (
        lambda path: edit(path, quantization={"group_size": 32, "bits": "4"}),
        "bits is '4': it must be",
    ),
    "config lacks a size": (lambda path: edit(path, hidden_size=None), "hidden_size"),
    "half a quantization": (lambda path: edit(path, quantization={"group_size": 32}), "bits"),
    "no weights": (lambda path: [file.unlink() for file in path.glob("model*")], "no *.safetensors"),
    "torch's weights": (lambda path: only(path, "pytorch_model.bin"), "no *.safetensors but pytorch_model.bin"),
    "a .pth": (lambda path: only(path, "consolidated.00.pth"), "no *.safetensors but consolidated.00.pth"),
    "a missing tensor": (lambda path: drop(path, NORM), NORM),
    "an extra tensor": (lambda path: add(path, "language_model.model.layers.0.extra.weight", (4,)), "layers.0.extra"),
    "a tensor of another shape": (lambda path: add(path, NORM, (63,)), NORM),
    "an empty file": (lambda path: cut(path, 0), "corrupt"),
    "a cut header": (lambda path: cut(path, 0.001), "header"),
    "cut data": (lambda path: cut(path, 0.99), "bytes"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_target_is_refused_in_one_line(case, tmp_path):
    path = write(tmp_path)
    spoil, word = WRONG[case]
    spoil(path)
    with pytest.raises(ValueError) as error:
        load_target(path)
    assert word in str(error.value) and "\n" not in str(error.value)
    assert str(path) in str(error.value) or case == "config lacks a size"


@pytest.mark.parametrize(
    ("files", "word"),
    [
        ({}, "adapter_config.json"),
        ({"adapter_config.json": "{"}, "adapter"),
        ({"adapter_config.json": '{"fine_tune_type": "lora"}'}, "num_layers"),
        ({"adapter_config.json": '{"num_layers": 2, "lora_parameters": {"rank": 4}}'}, "scale"),
    ],
)
def test_an_adapter_that_is_none_is_refused_in_one_line(files, word, tmp_path):
    path = write(tmp_path / "model")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for name, text in files.items():
        (adapter / name).write_text(text)
    with pytest.raises(ValueError) as error:
        load_target(path, adapter_path=str(adapter))
    assert word in str(error.value) and "\n" not in str(error.value)


def test_a_model_that_is_loaded_lazily_is_the_same(tmp_path):
    path = write(tmp_path, mx.float32)
    assert same_bits(logits(load_target(path, lazy=True)[0]), logits(load_target(path)[0]))
