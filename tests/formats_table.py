"""The formats that targets come in: what runs, what is refused, which fixtures and tests show it.

`python tests/formats_table.py` prints the table of docs/models.md; drafters_table.py has the drafters' rows.
"""

import ast
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent
GOLDENS = TESTS / "goldens"


@dataclass(frozen=True)
class Row:
    """A format, its status, where its fixture is from, and the tests `file::function` that use it.

    compared: with something independent; empty where nothing of the format runs. refused: what of the format is wrong.
    golden: a folder or file below tests/goldens, where there is one; cases: the tests' own names of its models, which
    must stand in a test file.
    """

    format: str
    status: str
    fixture: str
    compared: tuple[str, ...]
    refused: tuple[str, ...]
    golden: str | None = None
    cases: tuple[str, ...] = ()


EXPERTS = "test_experts::test_experts_that_the_config_does_not_describe_are_refused_by_name"
SCALES = (
    "test_scaled::test_what_the_publishers_packages_write_is_refused_without_its_scales",
    "test_scaled::test_a_negative_scale_of_the_publishers_packages_is_refused_by_name",
)

TARGETS = (
    Row(
        "mlx-lm's: float, affine 2 to 8 bits, mxfp4, mxfp8, nvfp4",
        "runs; on the Linux CPU mlx-lm's logits bit for bit",
        "written by mlx-lm in the test",
        ("test_load_target::test_what_mlx_lm_writes_gives_mlx_lms_logits",),
        ("test_load_target::test_what_is_no_target_is_refused_in_one_line",),
    ),
    Row(
        "Hugging Face `qwen3_5`",
        "runs; transformers' logits within 5e-4",
        "transformers 5.24",
        ("test_target_goldens::test_logits_and_taps_are_those_of_transformers",),
        (
            "test_target::test_a_geometry_that_is_no_hybrid_is_refused_by_name",
            "test_load_target::test_what_is_no_target_is_refused_in_one_line",
        ),
        "target_untied",
    ),
    Row(
        "`qwen3_5_moe`, mlx-lm's and Hugging Face's",
        "runs; mlx-lm's logits bit for bit (mlx runs dense experts on the CPU in float32 only)",
        "written by mlx-lm in the test; Hugging Face's names by hand",
        (
            "test_experts::test_every_accepted_row_has_the_bits_of_mlx_lm_fed_token_by_token",
            "test_experts::test_what_hugging_face_publishes_gives_mlx_lms_logits",
            "test_experts::test_what_mlx_lm_quantizes_keeps_its_routers_bits",
        ),
        ("test_experts::test_a_missing_expert_is_refused_by_name", EXPERTS),
    ),
    Row(
        "`qwen3_next`, mlx-lm's and Hugging Face's",
        "runs; mlx-lm's logits bit for bit",
        "as above",
        (
            "test_experts::test_every_accepted_row_has_the_bits_of_mlx_lm_fed_token_by_token",
            "test_experts::test_what_hugging_face_publishes_gives_mlx_lms_logits",
        ),
        (EXPERTS,),
    ),
    Row(
        "ModelOpt mixed precision (FP8, NVFP4, bf16), dense and with experts",
        "runs packed; every code's value to the last bit",
        "by hand, from the published file's table of names, dtypes and shapes",
        (
            "test_scaled::test_every_fp8_code_is_its_value_times_the_scale_of_its_tensor_or_row_to_the_last_bit",
            "test_scaled::test_every_fp4_code_under_every_block_scale_is_its_value_to_the_last_bit",
            "test_scaled::test_a_modelopt_checkpoint_gives_the_logits_of_the_dense_weights_that_it_means",
        ),
        ("test_scaled::test_what_can_not_be_right_is_refused_with_the_tensors_name",),
    ),
    Row(
        "compressed-tensors `nvfp4-pack-quantized`",
        "runs packed; transformers' logits on the package's values within 1e-3",
        "compressed-tensors 0.20.1",
        ("test_scaled::test_what_the_publishers_packages_wrote_gives_the_logits_of_transformers",),
        SCALES,
        "scaled/nvfp4-pack-quantized",
    ),
    Row(
        "compressed-tensors `float-quantized` (tensor, channel)",
        "as above",
        "compressed-tensors 0.20.1",
        ("test_scaled::test_what_the_publishers_packages_wrote_gives_the_logits_of_transformers",),
        SCALES,
        "scaled/float-quantized",
    ),
    Row(
        "compressed-tensors `float-quantized` (128 x 128 blocks)",
        "as above",
        "compressed-tensors 0.20.1",
        ("test_scaled::test_what_the_publishers_packages_wrote_gives_the_logits_of_transformers",),
        SCALES,
        "scaled/float-quantized-block",
    ),
    Row(
        "Hugging Face `fp8` (128 x 128 blocks)",
        "as above",
        "transformers 5.24",
        ("test_scaled::test_what_the_publishers_packages_wrote_gives_the_logits_of_transformers",),
        SCALES,
        "scaled/fp8",
    ),
    Row(
        "AWQ in 4 bits (`gemm`), dense",
        "runs by mlx-lm's reading, in float16; the logits of the weights that the codes mean within 2e-3",
        "by hand, by AutoAWQ's order of codes",
        ("test_quantization_config::test_awq_gives_the_logits_of_the_weights_that_its_codes_mean",),
        ("test_quantization_config::test_a_quantization_that_can_not_be_read_is_named_before_a_weight_is_read",),
    ),
    Row(
        "GPTQ, bitsandbytes, int4 of compressed-tensors, AWQ of other kinds, others",
        "refused, with the method's name",
        "by hand",
        (),
        ("test_quantization_config::test_a_quantization_that_can_not_be_read_is_named_before_a_weight_is_read",),
    ),
    Row(
        "GGUF `qwen35` and `qwen35moe`: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K packed; Q6_K and floats dense",
        "runs; every value to the last bit, transformers' logits within 2e-5, its ids of the file's own tokenizer",
        "gguf 0.19",
        (
            "test_gguf::test_every_value_of_a_type_is_the_one_that_ggufs_own_package_reads",
            "test_gguf::test_a_file_gives_the_logits_of_transformers_on_the_values_that_it_holds",
        ),
        ("test_gguf::test_what_can_not_be_read_is_refused_in_one_line",),
        "gguf",
    ),
    Row(
        "GGUF `llama`, `qwen2` and `qwen3`, the same types, with `rope_freqs` and `rope.scaling.*`",
        "runs by mlx-lm's classes; mlx-lm's logits on the values within 1e-4, ropes as ggml turns them",
        "written in the test, read by numpy",
        (
            "test_gguf_models::test_a_plain_files_logits_are_mlx_lms_on_its_values",
            "test_gguf_models::test_the_rope_turns_rows_as_ggml_does",
        ),
        ("test_gguf_models::test_a_rope_that_can_not_be_mapped_is_refused_by_its_key_and_inspect_says_the_same",),
    ),
    Row(
        "GGUF: other architectures, Q2_K, Q3_K, IQ, TQ, MXFP4",
        "refused, with the tensor's name and type",
        "the same, edited",
        (),
        ("test_gguf::test_what_can_not_be_read_is_refused_in_one_line",),
    ),
    Row(
        "any other mlx-lm model: Llama, Qwen3, Gemma 3 and 4, LFM2",
        "runs; mlx-lm's tokens (Gemma past its window: up to rounding)",
        "mlx-lm's own classes in the test",
        (
            "test_any_lm::test_every_accepted_row_has_the_bits_of_one_row_a_pass",
            "test_any_lm::test_speculation_gives_the_tokens_of_mlx_lm",
        ),
        ("test_load_target::test_what_is_no_target_is_refused_in_one_line",),
    ),
    Row(
        "a model object of mlx-lm's",
        "runs on its own arrays, nothing copied",
        "mlx-lm's own classes in the test",
        (
            "test_any_lm::test_a_hybrid_of_mlx_lm_is_rebuilt_on_the_same_arrays",
            "test_any_lm::test_generate_takes_what_mlx_lm_loads_and_its_list_of_caches",
        ),
        ("test_any_lm::test_what_is_no_language_model_is_refused_in_one_line",),
    ),
)


def table(rows: tuple[Row, ...]) -> str:
    """A Markdown table of the rows."""
    lines = ["| format | status | fixture | compared in | refused in |", "|---|---|---|---|---|"]
    for row in rows:
        lines.append(
            f"| {row.format} | {row.status} | {row.fixture} | {_files(row.compared)} | {_files(row.refused)} |"
        )
    return "\n".join(lines)


def _files(tests: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}.py`" for name in dict.fromkeys(test.partition("::")[0] for test in tests))


def missing(rows: tuple[Row, ...]) -> list[str]:
    """Tests, goldens, cases and packages that rows name and that are not there, and what a row needs and lacks."""
    found = []
    for row in rows:
        functions, strings = set(), set()
        for name in {test.partition("::")[0] for test in row.compared + row.refused}:
            file = next(TESTS.glob(f"*/{name}.py"), TESTS / f"{name}.py")
            tree = ast.parse(file.read_text(encoding="utf-8")) if file.is_file() else ast.Module([], [])
            functions |= {f"{name}::{node.name}" for node in tree.body if isinstance(node, ast.FunctionDef)}
            kits = [TESTS / f"{node.module}.py" for node in tree.body if isinstance(node, ast.ImportFrom)]
            for part in (tree, *(ast.parse(kit.read_text(encoding="utf-8")) for kit in kits if kit.is_file())):
                strings |= {node.value for node in ast.walk(part) if isinstance(node, ast.Constant)}
        found += [test for test in row.compared + row.refused if test not in functions]
        found += [f"{row.format}: no {case}" for case in row.cases if case not in strings]
        if not row.refused or (not row.compared and not row.status.startswith("refused")):
            found.append(f"{row.format}: no test that compares or that refuses it")
        if row.golden and not (GOLDENS / row.golden).exists():
            found.append(row.golden)
    return found


if __name__ == "__main__":
    print(table(TARGETS))
