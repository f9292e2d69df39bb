"""Every figure of the two published traffic accounts that follows from shapes, formats, a bandwidth and a τ.

The accounts are Satyajit Ghana's "144 tok/s needs 502 GB/s…" (2026-09-19, on incoai/splash) and "lithos-metal:
per-layer megakernels…" (2026-10-08). GB is 10⁹.
"""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from specmlx.cli import main
from specmlx.evaluation.chips import CHIPS, chip_named
from specmlx.evaluation.geometry import TARGETS, published_drafter, stored_format
from specmlx.evaluation.roofline import Roofline
from specmlx.evaluation.tensors import scheme_named, target_groups

QWEN = TARGETS["qwen3.8-27b"]
SPLASH = Roofline(QWEN, scheme_named("affine-4"), published_drafter("dflash2", QWEN), kv="int8", splash=True)
LITHOS = Roofline(QWEN, scheme_named("modelopt-nvfp4"), published_drafter("dspark", QWEN))
LONG = 32 * 1024
GB, MB = 1e9, 1e6


def group(line, label):
    return next(g for g in line.target + line.drafter if g.label.startswith(label))


def run(*args):
    return CliRunner().invoke(main, ["roofline", *map(str, args)])


def printed(*args):
    result = run(*args)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def cells(text, label):
    """The words of the one line that begins with a label, without the label."""
    found = [line for line in text.splitlines() if line.startswith(label)]
    assert len(found) == 1, (label, text)
    return found[0].removeprefix(label).split()


# What the first article prints: tensor, its MB each with their digits, count, GB with their digits.
SPLASH_TABLE = [
    ("GDN in-projection", "47.92", 48, "2.30"),
    ("GDN out-projection", "17.69", 48, "0.85"),
    ("attention in-projection", "41.29", 16, "0.66"),
    ("attention out-projection", "17.69", 16, "0.28"),
    ("SwiGLU gate, up, down", "150.41", 64, "9.63"),
    ("LM head", "715.16", 1, "0.72"),
    ("token embedding", "715.16", 1, "0.72"),
    ("DFlash 2 draft, 5 layers", "187.3", 5, "0.94"),
    ("draft context projection", "73.73", 1, "0.07"),
    ("selector codebooks", "127.14", 2, "0.25"),
]


def to_digits(value, like):
    return f"{value:.{len(like.partition('.')[2])}f}"


@pytest.mark.parametrize("label, each, count, total", SPLASH_TABLE)
def test_splash_tensors(label, each, count, total):
    found = group(SPLASH, label)
    (part,) = found.parts
    assert part.count == count
    assert to_digits(part.nbytes / MB, each) == each
    assert to_digits(found.nbytes / GB, total) == total


def test_splash_in_projection_is_padded():
    assert group(SPLASH, "GDN in-projection").label == "GDN in-projection (16,480 rows padded to 16,640)"
    assert group(replace(SPLASH, splash=False), "GDN in-projection").shape == "16480 × 5120"


def test_splash_vectors():
    vectors = group(SPLASH, "norms")
    gdn, attention, _ = vectors.parts
    assert (gdn.nbytes, gdn.count, attention.nbytes, attention.count) == (103_040, 48, 21_504, 16)
    assert (to_digits(gdn.nbytes / MB, "0.10"), to_digits(attention.nbytes / MB, "0.02")) == ("0.10", "0.02")
    assert to_digits(vectors.nbytes / GB, "0.005") == "0.005"


def test_splash_target_is_26_935_320_064_parameters_in_15_155_GB_at_4_5011_bits():
    parameters, nbytes = (sum(getattr(g, name) for g in SPLASH.target) for name in ("parameters", "nbytes"))
    assert f"{parameters:,}" == "26,935,320,064"
    assert f"{nbytes / GB:.3f}" == "15.155"
    assert f"{8 * nbytes / parameters:.4f}" == "4.5011"
    assert f"{sum(g.parameters for g in target_groups(QWEN, SPLASH.scheme)):,}" == "26,895,998,464"
    assert SPLASH.scheme.mlp.nbytes((16,)) * 4 == 4 * 8 + 4 * 4 and SPLASH.scheme.mlp.bits_per_weight == 4.5


def test_splash_draft_is_1_266_GB():
    assert f"{sum(g.nbytes for g in SPLASH.drafter) / GB:.3f}" == "1.266"


def test_splash_draft_matrices_alone():
    matrices = [g for g in SPLASH.drafter if g.shape != "vectors"]
    nbytes = sum(g.nbytes for g in matrices)
    assert f"{nbytes / GB:.5f}" == "1.26509"
    projection = group(SPLASH, "selector projection")
    assert f"{(nbytes - projection.nbytes + 2 * projection.parameters) / GB:.5f}" == "1.26697"
    layer, kernel = group(SPLASH, "DFlash 2 draft").parts[0].nbytes, SPLASH.scheme.drafter.nbytes((1280, 5120))
    assert (f"{layer / MB:.2f}", f"{(layer - kernel) / MB:.2f}") == ("187.27", "183.58")


def test_splash_cache_and_state():
    assert f"{SPLASH.kv_token_bytes:,} B, {SPLASH.kv_token_bytes / 1024} KiB" == "33,280 B, 32.5 KiB"
    assert f"{SPLASH.kv_token_bytes * LONG / GB:.2f}" == "1.09"
    state = SPLASH.state
    assert (state.recurrent_bytes, state.conv_bytes, state.nbytes) == (144 * 2**20, 3 * 2**20, 147 * 2**20)
    assert state.conv_layer_bytes == 64 * 1024
    assert f"{state.moved / GB:.2f}" == "0.31"


def test_splash_round_is_16_73_GB_and_17_82_GB_at_32K():
    assert f"{SPLASH.round_bytes() / GB:.2f}" == "16.73"
    assert f"{SPLASH.round_bytes(LONG) / GB:.2f}" == "17.82"
    embedding, head = group(SPLASH, "token embedding").nbytes, SPLASH.head.nbytes
    draft = sum(g.nbytes for g in SPLASH.drafter)
    whole = sum(g.nbytes for g in SPLASH.target) - embedding + draft + head + SPLASH.state.moved
    assert SPLASH.round_bytes() == whole
    vectors = group(SPLASH, "draft norms").nbytes
    assert f"{(whole - vectors) / GB:.4f}" == "16.7283"
    assert f"{(whole - vectors - 2 * SPLASH.state.conv_bytes) / GB:.4f}" == "16.7220"


@pytest.mark.parametrize(
    "speed, chip, rate, share, impossible",
    [
        (74, "M5 Pro", "258", "84", False),
        (144, "M5 Max 40-core", "502", "82", False),
        (144, "M5 Max 32-core", "502", "109", True),
    ],
)
def test_splash_claims_at_tau_4_80(speed, chip, rate, share, impossible):
    claim = SPLASH.claim(speed, 4.80, chip_named(chip).bandwidth)
    assert f"{claim.bytes_per_second / GB:.0f}" == rate
    assert f"{100 * claim.share:.0f}" == share
    assert claim.impossible == impossible


def test_splash_without_a_draft_on_307_GB_per_second_is_at_most_20_8():
    assert f"{SPLASH.ceiling(307, drafting=False):.1f}" == "20.8"
    without_conv = SPLASH.round_bytes(drafting=False) - 2 * SPLASH.state.conv_bytes
    assert f"{307e9 / without_conv:.1f}" == "20.8"


def test_splash_four_lanes_at_170_aggregate_are_156_GB_per_second():
    assert f"{replace(SPLASH, lanes=4).claim(170, 4.80).bytes_per_second / GB:.0f}" == "156"


def test_a_pass_gives_1_plus_7_times_the_acceptance_ratio():
    text = printed("--tau", 4.5, "--bandwidth", 307)
    assert SPLASH.rows == 8 and text.endswith(
        "4.50 = 1 + 7 × 0.500 tokens per pass: that share of the drafted tokens accepted.\n"
    )


LITHOS_TABLE = [
    ("MLP gate/up/down, 64 layers", "NVFP4 codes", "8.556"),
    ("MLP block scales", "E4M3 per 16", "1.070"),
    ("GDN projections, 48 layers", "FP8", "5.536"),
    ("attention projections, 16 layers", "FP8", "1.678"),
    ("small bf16 tensors (a, b projections, norms, conv)", "bf16", "0.053"),
    ("vocabulary head", "NVFP4 + scales", "0.715"),
    ("read on every pass", "", "17.608"),
    ("token embedding (one row gathered)", "bf16", "2.543"),
]


@pytest.mark.parametrize("label, fmt, total", LITHOS_TABLE)
def test_lithos_table_is_printed(label, fmt, total):
    *words, last = cells(printed("--weights", "modelopt-nvfp4", "--draft-kind", "dspark"), label)
    assert last == total
    assert " ".join(words).startswith(fmt)


def test_lithos_pass_is_17_608_GB():
    assert f"{LITHOS.target_bytes() / GB:.3f}" == "17.608"


def test_lithos_cache_and_state():
    assert f"{LITHOS.state.recurrent_bytes / MB:.0f}" == "151"
    assert f"{2 * LITHOS.state.recurrent_bytes / GB:.3f}" == "0.302"
    assert f"{LITHOS.kv_token_bytes:,}" == "65,536"
    assert f"{LITHOS.kv_token_bytes * LONG / GB:.2f}" == "2.15"


def test_keys_and_values_in_mlx_formats_have_their_scales():
    # 16 layers, keys and values, 4 heads of 256: 128 bytes of codes and four scales and biases in 4 bits.
    assert replace(LITHOS, kv="affine-4").kv_token_bytes == 16 * 2 * 4 * (128 + 4 * 4)
    assert replace(LITHOS, kv="affine-8-32").kv_token_bytes == 16 * 2 * 4 * (256 + 8 * 4)


def test_lithos_without_a_draft_on_614_4_GB_per_second():
    assert f"{LITHOS.ceiling(614.4, drafting=False):.1f}" == "34.3"
    assert f"{LITHOS.ceiling(614.4, context=LONG, drafting=False):.1f}" == "30.6"


def test_lithos_draft_block_reads_1_94_GB():
    w2 = group(LITHOS, "Markov W2")
    assert (f"{w2.nbytes / MB:.1f}", w2.reads) == ("35.8", 7)
    assert group(LITHOS, "Markov W1").reads == 0
    assert f"{LITHOS.head.nbytes / MB:.0f}" == "715"
    assert f"{LITHOS.draft_bytes / GB:.2f}" == "1.94"


@pytest.mark.parametrize(
    "name, bandwidth",
    [("M3 Pro", 153.6), ("M4 Max 40-core", 546), ("M5 Pro", 307), ("M5 Max 32-core", 460), ("M5 Max 40-core", 614)],
)
def test_chips_have_apples_bandwidths(name, bandwidth):
    assert chip_named(name).bandwidth == bandwidth


@pytest.mark.parametrize("name", ["m5-max-40", "M5 Max 40-core", "Apple M5 Max 40", "m5_max_40core"])
def test_chips_are_found_by_any_spelling(name):
    assert chip_named(name).name == "M5 Max 40-core"
    assert chip_named("Apple M5 Max", gpu_cores=32).bandwidth == 460
    assert chip_named("Apple M1 Max", gpu_cores=24).gpu_cores == 24
    assert all(chip_named(chip.name) is chip for chip in CHIPS)


@pytest.mark.parametrize(
    "chip, bandwidth, weights, multiply_adds, peak",
    [
        ("M1 Max", 400, "711", "5.7", 5.2),
        ("M4 Pro", 273, "485", "3.9", 4.1),
        ("M4 Max 40-core", 546, "971", "7.8", 8.1),
    ],
)
def test_eight_rows_in_4_bits_ask_for_about_all_multiply_adds_of_a_chip_before_M5(
    chip, bandwidth, weights, multiply_adds, peak
):
    per_weight = scheme_named("affine-4").mlp.bits_per_weight / 8
    assert per_weight == 0.5625
    assert f"{bandwidth / per_weight:.0f}" == weights
    rate = 8 * bandwidth * 1e9 / per_weight
    assert f"{rate / 1e12:.1f}" == multiply_adds
    assert chip_named(chip).multiply_adds / 1e12 == pytest.approx(peak, rel=0.03)
    assert 0.93 < rate / chip_named(chip).multiply_adds < 1.10
    assert chip_named("M5 Pro").multiply_adds is None


def test_the_arithmetic_limit_falls_with_the_rows_and_the_byte_limit_does_not():
    chip, narrow = chip_named("M1 Max"), replace(SPLASH, width=2)
    assert narrow.rows == 3 and narrow.round_bytes() == SPLASH.round_bytes()
    assert SPLASH.arithmetic_limit(chip, 2.0) < 0.5 * narrow.arithmetic_limit(chip, 2.0)
    weights = sum(g.parameters for g in SPLASH.target if g.rows)
    assert SPLASH.multiply_adds(drafting=False) == weights
    layer = 5120 * (6144 + 2 * 1280 + 4096 + 3 * 17408)
    draft = 5 * layer + 5120 * (5 * 5120) + 256 * 5120
    assert SPLASH.multiply_adds() == 8 * weights + 8 * draft + 7 * 248320 * 5120
    assert SPLASH.arithmetic_limit(chip_named("M5 Pro")) is None


def test_splash_table_is_printed_with_its_digits():
    text = printed("--weights", "affine-4", "--kv", "int8", "--tau", 4.8, "--claim", 74, "--claim", 144)
    for label, each, count, total in SPLASH_TABLE:
        found = cells(text, label)
        assert (found[-4], found[-3], found[-1]) == (each, str(count), total)
    assert "16640 × 5120" in text and "2 × (17408 × 5120), 5120 × 17408" in text and "2 × (248320 × 256)" in text
    assert cells(text, "norms, conv taps")[-7:] == ["0.10", "GDN,", "0.02", "attention", "64", "1", "0.005"]
    assert cells(text, "target total") == "26,935,320,064 parameters at 4.5011 bits 15.155".split()
    assert cells(text, "draft total")[-1] == "1.266"
    assert "33,280 B (32.5 KiB) a token" in text and cells(text, "KV cache")[-1] == "1.09"
    assert "48 × 48 × 128 × 128 (144 MiB) + conv inputs 48 × 64 KiB (3 MiB)  147 MiB  read + written  0.31" in text
    assert "16.73 GB with a short prompt, 17.82 GB at 32K" in text
    assert cells(text, "74 tok/s at 4.80 tokens per pass is") == ["258", "GB/s"]
    last = {line.split("  ")[0]: line.split() for line in text.splitlines() if line.startswith("M5")}
    assert last["M5 Max 32-core"][-3:] == ["109", "%", "impossible"] and last["M5 Pro"][-5:-3] == ["84", "%"]


def test_without_drafted_tokens_no_drafter_is_read():
    assert printed("--width", 0) == printed("--draft-kind", "none")


def test_a_number_or_a_chip_is_a_bandwidth():
    text = printed("--weights", "modelopt-nvfp4", "--draft-kind", "none", "--bandwidth", 614.4)
    assert cells(text, "given") == ["614.4", "34.3"]
    assert cells(printed("--draft-kind", "none", "--bandwidth", "m5-pro"), "M5 Pro") == ["307", "20.8"]
    text = printed("--bandwidth", "m5-max-32", "--claim", "144@4.8")
    assert "144 tok/s at 4.80 tokens per pass is 502 GB/s: 109 % of 460 GB/s (M5 Max 32-core): impossible" in text
    text = printed("--lanes", 4, "--bandwidth", 307, "--claim", "170@4.8")
    assert "170 tok/s aggregate at 4.80 tokens per pass is 156 GB/s: 51 % of 307 GB/s\n" in text


def test_json_is_one_object_of_whole_bytes():
    got = json.loads(printed("--kv", "int8", "--context", "32K", "--bandwidth", "M1-Max", "--claim", "100@4", "--json"))
    assert got["target_parameters"] == 26_935_320_064 and got["kv_token_bytes"] == 33_280
    assert got["round_bytes"] == SPLASH.round_bytes(LONG) and got["context"] == LONG
    assert sum(g["nbytes"] for g in got["target"]) == got["target_nbytes"]
    (limit,) = got["limits"]
    assert [x["tau"] for x in limit["by_tau"]] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert limit["by_tau"][3]["byte_limit"] == pytest.approx(4 * 400e9 / got["round_bytes"])
    (claim,) = got["claims"]
    assert claim["share"] == pytest.approx(25 * got["round_bytes"] / 400e9) and claim["impossible"]


def test_a_config_file_a_directory_and_the_name_agree(tmp_path):
    config = {
        name: getattr(QWEN, name)
        for name in (
            "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
            "vocab_size linear_num_value_heads linear_num_key_heads linear_key_head_dim linear_value_head_dim"
        ).split()
    }
    quantization = {"bits": 4, "group_size": 64}
    whole = {"model_type": "qwen3_5", "text_config": config, "quantization": quantization}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    tables = [
        json.loads(printed("--model", model, "--layout", "splash", "--draft-kind", "dflash2", "--json"))
        for model in (tmp_path, tmp_path / "config.json", "qwen3.8-27b")
    ]
    assert tables[0]["target"] == tables[1]["target"] == tables[2]["target"]
    assert {table["weights"] for table in tables} == {"affine-4-64"}
    exact = json.loads(printed("--model", tmp_path, "--json"))
    assert exact["target_parameters"] == 26_895_998_464 and exact["draft"] is None


def test_a_mixture_reads_what_its_rows_can_choose(tmp_path):
    sizes = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
    config = QWEN.__dict__ | sizes | {"shared_expert_intermediate_size": 512, "intermediate_size": 0}
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "qwen3_5_moe"}))
    whole = 64 * 16 * 3 * 512 * 5120 * 4.5 / 8
    for lanes, share in ((1, 0.125), (3, 0.375), (9, 1)):
        args = ["--model", tmp_path, "--weights", "affine-4", "--lanes", lanes]
        got = json.loads(printed(*args, "--json"))
        (experts,) = [group for group in got["target"] if group["kind"] == "experts"]
        assert experts["nbytes"] == whole
        others = sum(g["nbytes"] * g["reads"] for g in got["target"]) - whole
        assert got["round_bytes"] == others + share * whole + lanes * 2 * got["state_bytes"]
        assert cells(printed(*args), "experts, 2 of 16 a row")[-3:-1] == ["≤", f"{share:.2f}"]
    assert run("--model", tmp_path, "--draft-kind", "dflash").stderr.endswith("pass --draft-model\n")


@pytest.mark.parametrize(
    "settings, weights",
    [
        ({"quantization": {"bits": 3, "group_size": 32}}, "affine-3-32"),
        ({"quantization": {"bits": 4, "group_size": 16, "mode": "nvfp4"}}, "mlx-nvfp4"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}}, "modelopt-nvfp4"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "fp8-block"),
        ({"text_config": {"dtype": "float16"}}, "fp16"),
        ({}, "bf16"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, None),
        ({"torch_dtype": "float8"}, None),
        ({"quantization": {"group_size": 64}}, None),
        ({"quantization": [4, 64]}, None),
        ({"quantization_config": "fp8"}, None),
    ],
)
def test_a_config_tells_the_format_of_its_files_or_is_refused(settings, weights):
    if weights is None:
        with pytest.raises(ValueError, match="pass --weights"):
            stored_format(settings)
    else:
        assert stored_format(settings) == weights


def test_a_drafters_own_config_gives_its_shape():
    got = json.loads(printed("--model", "demo", "--draft-model", "demo/dspark", "--json"))
    assert got["weights"] == "fp32" and got["rows"] == 9 and got["draft"]["markov_rank"] == 32
    assert sum(g["parameters"] for g in got["drafter"]) == 525_345


@pytest.mark.parametrize(
    "args, said",
    [
        (["--model", "qwen9"], "no geometry named qwen9: there are qwen3.8-27b"),
        (["--model", "nowhere/config.json"], "no such file: nowhere/config.json"),
        (["--weights", "int4"], "unknown format 'int4'"),
        (["--bandwidth", "M9"], "unknown chip 'M9'"),
        (["--bandwidth", "M5 Max"], "is one of M5 Max 32-core, M5 Max 40-core: say which"),
        (["--bandwidth", "-3"], "above 0 GB/s"),
        (["--tau", "9"], "9 tokens per pass: a round of 8 rows delivers 1 to 8"),
        (["--tau", "nan"], "nan tokens per pass"),
        (["--tau", "0"], "0 tokens per pass"),
        (["--claim", "74@0", "--tau", "2"], "0 tokens per pass"),
        (["--draft-model", "demo/dflash"], "hidden size: the drafter's is 128, the target's 5120"),
        (["--draft-model", "demo/x"], "no demo part named 'demo/x'"),
        (["--width", "8"], "8: this drafter proposes 0 to 7"),
        (["--claim", "74"], "--claim 74 needs its tokens per pass"),
        (["--claim", "nan@4"], "a speed is above 0 tok/s"),
        (["--claim", "fast"], "'fast' is no speed like 74"),
        (["--kv", "int4"], "'int4': it can be bf16, fp16, fp32, int8 or affine-BITS"),
        (["--kv", "affine-7"], "affine-7-64: bits are one of"),
        (["--context", "much"], "'much' is no number of tokens"),
        (["--plot", "x.pdf"], "must end in .png or .svg"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(args, said, tmp_path):
    result = run(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr and result.stderr.count("\n") == 1


def test_a_missing_matplotlib_is_one_line(tmp_path):
    code = "import sys; sys.modules['matplotlib'] = None; from specmlx.cli import main; main()"
    file = tmp_path / "x.png"
    args = [sys.executable, "-c", code, "roofline", "--plot", str(file)]
    result = subprocess.run(args, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "Error: --plot needs matplotlib: pip install 'specmlx[plot]'\n"
    assert not file.exists()


def test_a_plot_has_a_line_a_bandwidth_and_the_claims(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'specmlx[plot]'")
    printed("--plot", tmp_path / "x.png", "--claim", "74@4.8")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    printed("--plot", tmp_path / "x.svg", "--claim", "74@4.8")
    svg = (tmp_path / "x.svg").read_text(encoding="utf-8")
    assert "M5 Pro 307 GB/s" in svg and "74 tok/s" in svg


def test_the_documentation_shows_what_the_commands_print():
    text = (Path(__file__).parents[2] / "docs" / "receipts.md").read_text(encoding="utf-8")
    samples = re.findall(r"```sh\nspecmlx roofline ([^\n]+)\n```\n\n```\n(.+?)\n```", text, re.S)
    assert len(samples) == 2
    for args, shown in samples:
        assert printed(*args.split()).rstrip() == shown
