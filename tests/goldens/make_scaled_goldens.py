"""Makes scaled/: tiny Qwen3.5 checkpoints in FP8 and NVFP4, written by the packages that publishers write them with.

Run once, from the repository root, with

    pip install torch transformers compressed-tensors safetensors numpy accelerate
    python tests/goldens/make_scaled_goldens.py

compressed-tensors compresses its formats, transformers' own operation the `fp8` of 128 x 128 blocks. Each folder holds
the checkpoint as it was saved, and `expected.safetensors`: tokens [N] and the logits [N, V] that transformers makes of
the weights once the same package has decompressed them, in float32.
"""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from transformers import FineGrainedFP8Config, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.integrations.finegrained_fp8 import Fp8Quantize

HERE = Path(__file__).parent / "scaled"
SIZES = dict(
    vocab_size=48,
    hidden_size=128,
    intermediate_size=128,
    num_hidden_layers=2,
    layer_types=["linear_attention", "full_attention"],
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=64,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
    linear_conv_kernel_dim=4,
    rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.25),
    tie_word_embeddings=False,
)
# What all publishers leave alone: few rows, and what is no matrix of a projection.
IGNORE = ["lm_head", "re:.*in_proj_a$", "re:.*in_proj_b$"]
FORMATS = {"nvfp4-pack-quantized": "NVFP4A16", "float-quantized": "FP8_DYNAMIC", "float-quantized-block": "FP8_BLOCK"}


def random_model(seed: int) -> Qwen3_5ForCausalLM:
    torch.manual_seed(seed)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZES)).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 2:
                p.normal_(0, 0.08)
            elif name.endswith("A_log"):
                p.fill_(-3)
    return model.to(torch.bfloat16)


def tokens() -> torch.Tensor:
    return torch.randint(0, SIZES["vocab_size"], (1, 24), generator=torch.Generator().manual_seed(1))


def save_expected(folder: Path, model: Qwen3_5ForCausalLM) -> None:
    with torch.no_grad():
        logits = model.float()(tokens()).logits[0]
    save_file({"tokens": tokens()[0].int(), "logits": logits.contiguous()}, folder / "expected.safetensors")


def compressed(folder: Path, preset: str) -> None:
    model = random_model(0)
    scheme = preset_name_to_scheme(preset, ["Linear"])
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=IGNORE))
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            calibrate(module)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    weights = {
        f"{name}.weight": dense_weight(module)
        for name, module in model.named_modules()
        if getattr(module, "quantization_scheme", None) is not None
    }
    # Another model: the compressed one would quantize its activations too.
    dense = random_model(0).float()
    dense.load_state_dict(weights, strict=False)
    save_expected(folder, dense)


def dense_weight(module: torch.nn.Module) -> torch.Tensor:
    """What a compressed module's codes mean, by the package, in float32."""
    codes, divisor = getattr(module, "weight_packed", None), getattr(module, "weight_global_scale", None)
    if codes is None:
        codes = module.weight.float()
    else:
        codes = unpack_fp4_from_uint8(codes, codes.shape[0], 2 * codes.shape[1], torch.float32)
    args, scale = module.quantization_scheme.weights, module.weight_scale.float()
    return dequantize(x_q=codes, scale=scale, args=args, global_scale=divisor, dtype=torch.float32)


def calibrate(module: torch.nn.Module) -> None:
    """Scales from the least and largest weight of each group, as a calibration by minmax sets them."""
    args, W = module.quantization_scheme.weights, module.weight.data.float()
    options = {}
    if args.strategy == "tensor_group":
        options["global_scale"] = generate_gparam(W.min().reshape(1), W.max().reshape(1))
        module.weight_global_scale.data = options["global_scale"]
        W = W.reshape(W.shape[0], -1, args.group_size)
        least, most = W.amin(-1), W.amax(-1)
    elif args.strategy == "block":
        b0, b1 = args.block_structure
        W = W.reshape(W.shape[0] // b0, b0, W.shape[1] // b1, b1)
        least, most = W.amin((1, 3)), W.amax((1, 3))
    else:
        least, most = W.amin(-1, keepdim=True), W.amax(-1, keepdim=True)
    scale, _ = calculate_qparams(least, most, args, **options)
    module.weight_scale.data = scale.to(module.weight_scale.dtype)


def hugging_face_fp8(folder: Path) -> None:
    model = random_model(0)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    weights, written = load_file(file), {}
    quantizer = SimpleNamespace(quantization_config=FineGrainedFP8Config(weight_block_size=(128, 128)))
    dense = {}
    for name, W in weights.items():
        if W.ndim != 2 or any(part in name for part in ("embed", "lm_head", "in_proj_a", "in_proj_b")):
            written[name] = W
            continue
        written |= Fp8Quantize(quantizer).convert({name: W}, full_layer_name=name)
        codes, scale = written[name], written[name.replace("weight", "weight_scale_inv")]
        blocks = codes.float().reshape(codes.shape[0] // 128, 128, codes.shape[1] // 128, 128)
        dense[name] = (blocks * scale.float()[:, None, :, None]).reshape(codes.shape)
    save_file({k: v.contiguous() for k, v in written.items()}, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    skipped = ["lm_head", *(f"model.layers.0.linear_attn.in_proj_{x}" for x in "ab")]
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": skipped,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    model = model.float()
    model.load_state_dict(dense, strict=False)
    save_expected(folder, model)


if __name__ == "__main__":
    shutil.rmtree(HERE, ignore_errors=True)
    for name, preset in FORMATS.items():
        compressed(HERE / name, preset)
    hugging_face_fp8(HERE / "fp8")
    for file in HERE.glob("*/generation_config.json"):
        file.unlink()
