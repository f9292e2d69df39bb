"""GGUF files of plain models against mlx-lm on their values, ropes against ggml's formula, MTP heads, stop tokens."""

import math
import shutil

import mlx.core as mx
import numpy as np
import pytest
from gguf_kit import (
    BASE,
    FF,
    HEADS,
    HYBRID,
    KV,
    D,
    H,
    V,
    hybrid_shapes,
    model_file,
    mtp_shapes,
    plain_shapes,
)
from gguf_models_kit import IDS, KINDS, hugging_faces
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes
from rig import small_tokenizer

import specmlx
from specmlx.loading.convert import convert
from specmlx.loading.inspect import inspect_path
from specmlx.targets.any_lm import AnyLM
from specmlx.targets.checkpoint import load_target


def llama3_factors(factor: float, low: float, high: float, positions: int) -> list[float]:
    """As llama.cpp's converter writes them."""
    found = []
    for i in range(0, D, 2):
        wavelength = 2 * math.pi * 1e4 ** (i / D)
        smooth = min(max((positions / wavelength - low) / (high - low), 0), 1)
        found.append(1 / ((1 - smooth) / factor + smooth))
    return found


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0, "beta_slow": 2.0}
YARN_KEYS = {
    "type": "yarn",
    "factor": 4.0,
    "original_context_length": 64,
    "yarn_beta_fast": 16.0,
    "yarn_beta_slow": 2.0,
}
SCALINGS = {
    "llama": (LLAMA3, {}, {"rope_freqs.weight": llama3_factors(8, 1, 4, 256)}),
    "qwen2": (YARN, {f"rope.scaling.{key}": value for key, value in YARN_KEYS.items()}, {}),
    "qwen3": (
        {"rope_type": "linear", "factor": 2.0},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
        {},
    ),
}


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_a_plain_files_logits_are_mlx_lms_on_its_values(arch, scaled, tmp_path):
    scaling, keys, extra = SCALINGS[arch] if scaled else (None, {}, {})
    tied, metadata = arch == "llama", BASE | {"block_count": 2} | keys
    if arch == "qwen3":
        metadata["attention.key_length"] = D
    file, values = model_file(tmp_path / "m.gguf", arch, plain_shapes(arch, tied), metadata, KINDS[arch], extra)
    config = dict(
        model_type=arch,
        hidden_size=H,
        num_hidden_layers=2,
        intermediate_size=FF,
        num_attention_heads=HEADS,
        num_key_value_heads=KV,
        head_dim=D,
        rms_norm_eps=1e-6,
        vocab_size=V,
        max_position_embeddings=4096,
        rope_theta=1e4,
        rope_scaling=scaling,
        tie_word_embeddings=tied,
    )
    model_class, args = _get_classes(config)
    theirs = model_class(args.from_dict(config))
    theirs.load_weights([*hugging_faces(values, arch == "llama").items()])
    want = theirs(IDS)
    ours, read = load_target(file)
    assert isinstance(ours, AnyLM) and ours.dtype == mx.float32 and read["tie_word_embeddings"] == tied
    got = ours.verify(ours.new_states(), IDS).logits
    assert want.std().item() > 0.1 and mx.abs(got - want).max().item() < 1e-4
    packed = {name for name in KINDS[arch] if KINDS[arch][name] not in ("F16", "Q6_K")}
    assert sum(name.endswith(".scales") for name, _ in tree_flatten(ours.lm.parameters())) == sum(
        sum(part.removesuffix(".weight").rpartition(".")[2] == name for part in values) for name in packed
    )
    assert ["has no tokenizer that can be used" in line for line in inspect_path(file).questions] == [True]
    small_tokenizer(tmp_path)
    assert not inspect_path(file).questions


@pytest.mark.parametrize("draft_model", ["ngram", "auto"])
def test_a_plain_file_answers_with_a_drafter_as_without_and_mlx_lm_runs_its_conversion(draft_model, tmp_path):
    file, _ = model_file(
        tmp_path / "m.gguf", "llama", plain_shapes("llama", True), BASE | {"block_count": 2}, KINDS["llama"]
    )
    small_tokenizer(tmp_path)
    plain, tokenizer = specmlx.load(str(file), draft_model=None)
    drafting, _ = specmlx.load(str(file), draft_model=draft_model)
    prompt = [1, 2, 3, 1, 2, 3, 1, 2]
    texts = [[r.token for r in specmlx.stream_generate(m, tokenizer, prompt, 24)] for m in (plain, drafting)]
    assert texts[0] == texts[1]
    with pytest.raises(ValueError, match="needs a target that was loaded from files|mtp"):
        specmlx.load(str(file), draft_model="mtp")
    import mlx_lm

    theirs, _ = mlx_lm.load(str(convert(str(file), tmp_path / "out")))
    assert mx.abs(theirs(IDS) - plain.lm(IDS)).max().item() < 1e-5


def ggml_rope(x: np.ndarray, position: int, dims: int, base: float, keys: dict, factors: list | None) -> np.ndarray:
    """ggml's rope of rows `[..., D]`, halves turned, by ggml's and llama.cpp's own parameters."""
    kind = keys.get("type", "linear")
    factor = keys.get("factor", 1.0)
    scale, ext = (1.0, 0.0) if kind == "none" else (1 / factor, float(kind == "yarn"))
    m = 1.0
    if ext:
        if "yarn_log_multiplier" in keys:
            m = (1 + 0.1 * math.log(factor)) / (1 + 0.1 * keys["yarn_log_multiplier"] * math.log(factor))
        else:
            m = 1 + 0.1 * math.log(factor)
        m = keys.get("yarn_attn_factor", m) * keys.get("attn_factor", 1.0)
    original = keys.get("original_context_length", 4096)

    def dimension(turns: float) -> float:
        return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    start = max(0, math.floor(dimension(keys.get("yarn_beta_fast", 32.0))))
    end = min(dims - 1, math.ceil(dimension(keys.get("yarn_beta_slow", 1.0))))
    out = x.copy()
    for i in range(dims // 2):
        extrapolated = position * base ** (-2 * i / dims) / (factors[i] if factors else 1)
        angle = scale * extrapolated
        if ext:
            mix = 1 - min(1, max(0, (i - start) / max(0.001, end - start)))
            angle = angle * (1 - mix) + extrapolated * mix
        a, b = x[..., i], x[..., i + dims // 2]
        out[..., i] = m * (a * math.cos(angle) - b * math.sin(angle))
        out[..., i + dims // 2] = m * (a * math.sin(angle) + b * math.cos(angle))
    return out


ROPES = {
    "no type": {"factor": 4.0},
    "linear": {"type": "linear", "factor": 4.0, "finetuned": True},
    "none": {"type": "none", "factor": 4.0},
    "yarn": {"type": "yarn", "factor": 4.0, "original_context_length": 512, "finetuned": False},
    "yarn of the whole context": {"type": "yarn", "factor": 2.0},
    "yarn with its betas": {"type": "yarn", "factor": 8.0, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0},
    "yarn with a factor on top": {"type": "yarn", "factor": 4.0, "attn_factor": 0.5, "yarn_ext_factor": 1.0},
    "yarn with transformers' attention_factor": {"type": "yarn", "factor": 4.0, "yarn_attn_factor": 1.5},
    "yarn with mscale_all_dim": {"type": "yarn", "factor": 4.0, "yarn_log_multiplier": 0.7, "yarn_ext_factor": -1.0},
}


@pytest.mark.parametrize(("name", "freqs"), [(name, freqs) for name in ROPES for freqs in (False, "yarn" not in name)])
@pytest.mark.parametrize("arch", ["qwen35", "qwen3"])
def test_the_rope_turns_rows_as_ggml_does(arch, name, freqs, tmp_path):
    dims = 8 if arch == "qwen35" else D
    factors = [1.0, 1.5, 3.0, 7.0, 8.0, 8.0, 8.0, 8.0][: dims // 2] if freqs else None
    metadata = (HYBRID if arch == "qwen35" else BASE) | {f"rope.scaling.{k}": v for k, v in ROPES[name].items()}
    shapes = hybrid_shapes() if arch == "qwen35" else plain_shapes(arch, False)
    extra = {"rope_freqs.weight": factors} if freqs else {}
    file, _ = model_file(tmp_path / "m.gguf", arch, shapes, metadata | {"block_count": 2}, extra=extra)
    model = load_target(file)[0]
    x = np.random.default_rng(1).normal(size=(1, 2, 1, D)).astype(np.float32)
    for position in (0, 1, 77, 4000):
        got = np.array(model.layers[1].self_attn.rope(mx.array(x), offset=position))
        want = ggml_rope(x, position, dims, 1e4, ROPES[name], factors)
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-3)
        assert position != 77 or np.abs(got - want).max() < 5e-5


REFUSED = {
    "another scaling": ({"type": "longrope"}, "rope.scaling.type is 'longrope'"),
    "a type of another kind": ({"type": 3}, "rope.scaling.type is 3"),
    "a key of another model": ({"type": "linear", "factor": 2.0, "alpha": 3.0}, "rope.scaling.alpha is 3.0"),
    "a factor that can't be": ({"type": "linear", "factor": -2.0}, "rope.scaling.factor is -2.0"),
    "a yarn that is mixed": (
        {"type": "yarn", "factor": 2.0, "yarn_ext_factor": 0.5},
        "rope.scaling.yarn_ext_factor is 0.5",
    ),
    "a yarn's key without yarn": ({"factor": 2.0, "yarn_beta_fast": 8.0}, "rope.scaling.yarn_beta_fast is 8.0"),
    "a factor of cosines without yarn": ({"factor": 2.0, "attn_factor": 1.2}, "rope.scaling.attn_factor is 1.2"),
    "two that say the same": (
        {"type": "yarn", "factor": 2.0, "yarn_log_multiplier": 0.1, "yarn_attn_factor": 1.1},
        "rope.scaling.yarn_log_multiplier",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("arch", ["qwen35", "qwen3"])
def test_a_rope_that_can_not_be_mapped_is_refused_by_its_key_and_inspect_says_the_same(arch, name, tmp_path):
    keys, word = REFUSED[name]
    metadata = (HYBRID if arch == "qwen35" else BASE) | {"block_count": 2}
    metadata |= {f"rope.scaling.{key}": value for key, value in keys.items()}
    shapes = hybrid_shapes() if arch == "qwen35" else plain_shapes(arch, False)
    file, _ = model_file(tmp_path / "m.gguf", arch, shapes, metadata)
    with pytest.raises(ValueError) as error:
        load_target(file)
    said = str(error.value)
    assert word in said and "\n" not in said and len(said.replace(str(file), "")) < 200
    assert inspect_path(file).questions == [said]


def without(shapes: dict, *names: str) -> dict:
    return {name: shape for name, shape in shapes.items() if not name.endswith(names)}


COUNTS = {
    "no head": ({"block_count": 2}, {}),
    "declared, counted and left out": ({"block_count": 3, "nextn_predict_layers": 1}, {}),
    "declared and left out": ({"block_count": 2, "nextn_predict_layers": 1}, {}),
    "declared and counted": ({"block_count": 3, "nextn_predict_layers": 1}, mtp_shapes()),
    "declared, not counted": ({"block_count": 2, "nextn_predict_layers": 1}, mtp_shapes()),
    "counted, not declared": ({"block_count": 3}, mtp_shapes()),
    "neither": ({"block_count": 2}, mtp_shapes()),
    "without a norm of its own": (
        {"block_count": 3, "nextn_predict_layers": 1},
        without(mtp_shapes(), "head_norm.weight"),
    ),
}


@pytest.fixture(scope="module")
def trunk(tmp_path_factory) -> mx.array:
    file, _ = model_file(
        tmp_path_factory.mktemp("trunk") / "m.gguf", "qwen35", hybrid_shapes(), HYBRID | {"block_count": 2}
    )
    return load_target(file)[0](IDS)


@pytest.mark.parametrize("name", COUNTS)
def test_an_mtp_head_is_read_however_it_is_counted_and_no_layer_of_the_trunk_is_dropped(name, trunk, tmp_path):
    counts, head = COUNTS[name]
    file, values = model_file(
        tmp_path / "m.gguf", "qwen35", hybrid_shapes() | head, HYBRID | counts, {"eh_proj": "Q8_0"}
    )
    small_tokenizer(tmp_path)
    model, tokenizer = specmlx.load(str(file))
    assert len(model.layers) == 2 and mx.array_equal(model(IDS), trunk).item()
    found = inspect_path(file)
    assert (
        not found.questions and found.geometry["num_hidden_layers"] == 2 and ("MTP head" in found.groups) == bool(head)
    )
    if not head:
        assert type(model.draft_model).__name__ == "NGram"
        with pytest.raises(ValueError, match="has no MTP head"):
            specmlx.load(str(file), draft_model="mtp")
        return
    assert type(model.draft_model).__name__ == "MTP"
    named, _ = specmlx.load(str(file), draft_model="mtp")
    parameters = dict(tree_flatten(named.draft_model.model.parameters()))
    want = {
        "pre_fc_norm_embedding.weight": "blk.2.nextn.enorm.weight",
        "pre_fc_norm_hidden.weight": "blk.2.nextn.hnorm.weight",
        "norm.weight": "blk.2.nextn.shared_head_norm.weight",
        "layers.0.input_layernorm.weight": "blk.2.attn_norm.weight",
        "layers.0.post_attention_layernorm.weight": "blk.2.post_attention_norm.weight",
        "layers.0.self_attn.q_proj.weight": "blk.2.attn_q.weight",
        "layers.0.self_attn.o_proj.weight": "blk.2.attn_output.weight",
        "layers.0.self_attn.k_norm.weight": "blk.2.attn_k_norm.weight",
        "layers.0.mlp.down_proj.weight": "blk.2.ffn_down.weight",
    }
    for ours, theirs in want.items():
        theirs = theirs if theirs in values else "output_norm.weight"
        assert mx.array_equal(parameters[ours], mx.array(values[theirs])).item(), ours
    fc = mx.dequantize(parameters["fc.weight"], parameters["fc.scales"], parameters["fc.biases"], 32, 8)
    assert mx.array_equal(fc, mx.array(values["blk.2.nextn.eh_proj.weight"])).item()
    with_head = list(specmlx.stream_generate(named, tokenizer, [1, 2, 3], 12, num_draft_tokens=3))
    plain = [r.token for r in specmlx.stream_generate(named, tokenizer, [1, 2, 3], 12, draft_model=None)]
    assert [r.token for r in with_head] == plain and with_head[-1].stats.proposed > 0
    kept, _ = specmlx.load(str(convert(str(file), tmp_path / "out", draft_model="mtp")))
    again = dict(tree_flatten(kept.draft_model.model.parameters()))
    assert again.keys() == parameters.keys() and all(mx.array_equal(again[k], parameters[k]).item() for k in again)


BROKEN = {
    "a layer is missing": (HYBRID | {"block_count": 3}, hybrid_shapes(), "block_count is 3"),
    "a layer in the middle is missing": (
        HYBRID | {"block_count": 3},
        {name.replace("blk.1.", "blk.2."): shape for name, shape in hybrid_shapes().items()},
        "layers are not all there: 2 of 3",
    ),
    "a head alone": (HYBRID | {"block_count": 3}, {"token_embd.weight": (V, H)} | mtp_shapes(), "of an MTP head"),
    "a tensor too many": (HYBRID | {"block_count": 2}, hybrid_shapes() | {"blk.1.attn_q.bias": (H,)}, "attn_q.bias"),
    "a tensor too few": (
        HYBRID | {"block_count": 2},
        without(hybrid_shapes(), "ssm_norm.weight"),
        "norm.weight: it may be cut",
    ),
    "a tensor of another shape": (
        HYBRID | {"block_count": 2},
        hybrid_shapes() | {"blk.1.ffn_up.weight": (FF, H // 2)},
        "ffn_up.weight is [256, 32], should be [256, 64]",
    ),
    "no rope": (
        {k: v for k, v in HYBRID.items() if k != "rope.dimension_count"} | {"block_count": 2},
        hybrid_shapes(),
        "it lacks",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_can_not_be_run_is_told_by_the_header_and_by_inspect_alike(name, tmp_path):
    metadata, shapes, word = BROKEN[name]
    file, _ = model_file(tmp_path / "m.gguf", "qwen35", shapes, metadata)
    with pytest.raises(ValueError) as error:
        load_target(file)
    assert word in str(error.value) and inspect_path(file).questions == [str(error.value)]


def test_all_ends_of_a_text_stop_it(tmp_path):
    ends = {"tokenizer.ggml.eos_token_id": 7, "tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.eom_token_id": 11}
    file, _ = model_file(tmp_path / "m.gguf", "qwen35", hybrid_shapes(), HYBRID | {"block_count": 2} | ends)
    small_tokenizer(tmp_path)
    assert specmlx.load(str(file))[1].eos_token_ids >= {7, 9, 11}


@pytest.mark.parametrize("name", ["mmproj-F16.gguf", "model-mmproj.gguf", "vision.gguf", "m.imatrix.gguf"])
def test_a_projector_or_a_matrix_of_importance_beside_the_model_is_no_second_model(name, tmp_path):
    file, _ = model_file(tmp_path / "m.gguf", "qwen35", hybrid_shapes(), HYBRID | {"block_count": 2})
    small_tokenizer(tmp_path)
    model_file(tmp_path / name, "clip", {"v.patch_embd.weight": (H, H)}, {"general.type": "mmproj"})
    assert len(load_target(tmp_path)[0].layers) == 2 and not inspect_path(tmp_path).questions
    with pytest.raises(ValueError, match="is a 'clip'"):
        load_target(tmp_path / name)
    shutil.copy(file, tmp_path / "z.gguf")
    with pytest.raises(ValueError, match="has several models"):
        load_target(tmp_path)


def test_a_tensor_in_two_parts_and_a_part_without_its_fellows_are_refused(tmp_path):
    shapes, split = hybrid_shapes(), {"split.count": 2}
    first = dict([*shapes.items()][:10])
    rest = {name: shape for name, shape in shapes.items() if name not in first}
    metadata = HYBRID | {"block_count": 2} | split
    model_file(tmp_path / "m-00001-of-00002.gguf", "qwen35", first, metadata)
    second, _ = model_file(tmp_path / "m-00002-of-00002.gguf", "qwen35", rest, split)
    assert len(load_target(tmp_path / "m-00001-of-00002.gguf")[0].layers) == 2
    shutil.copy(tmp_path / "m-00001-of-00002.gguf", tmp_path / "one.gguf")
    with pytest.raises(ValueError, match="one.gguf is one of 2 parts"):
        load_target(tmp_path / "one.gguf")
    model_file(second, "qwen35", rest | {"output.weight": (V, H)}, split)
    with pytest.raises(ValueError, match=r"output.weight is in .*m-00001-of.* and in .*m-00002-of"):
        load_target(tmp_path / "m-00002-of-00002.gguf")
