"""The formats that drafters come in, and the options that make them cheaper, as rows of formats_table.py.

`python tests/drafters_table.py` prints the table of docs/models.md.
"""

from formats_table import Row, table

PUBLISHED = "test_drafter_goldens::test_proposals_are_those_of_the_publishers_code"
PACKAGE = "test_speculators::test_logits_and_confidence_are_those_of_the_packages_forward_pass"
OPEN = "test_speculators::test_what_a_package_leaves_open_is_asked_in_one_line"
UNKNOWN = "test_pairing::test_what_can_not_be_loaded_yet_is_named_in_one_line"
UNFIT = "test_pairing::test_a_reason_names_both_values"
TENSORS = "test_pairing::test_missing_extra_and_misshapen_tensors_are_listed"
SETTINGS = (
    "test_draft_settings::test_settings_that_make_no_sense_are_refused",
    "test_draft_settings::test_settings_that_a_drafter_has_no_use_for_are_refused_before_it_is_changed",
)

DRAFTERS = (
    Row(
        "z-lab DFlash (full, sliding, causal, scaled, YaRN, biases)",
        "loads; z-lab's logits within 3e-5, the same tokens",
        "z-lab's torch code (PyPI: dflash 0.1.0)",
        (PUBLISHED,),
        (UNKNOWN, UNFIT, TENSORS),
        "drafters",
        (
            "dflash_full",
            "dflash_sliding",
            "dflash_sliding_bidirectional",
            "dflash_causal_scaled",
            "dflash_yarn",
            "dflash_biased",
        ),
    ),
    Row(
        "z-lab DFlash 2 (full, sliding, causal, scaled)",
        "loads; z-lab's scores within 3e-5, the same walk; no path is expected to keep more than the greedy one",
        "as above",
        (
            PUBLISHED,
            "test_dflash2::test_a_greedy_lane_gets_the_best_path_of_the_formulas_scores",
            "test_dflash2::test_no_path_is_expected_to_keep_more_than_the_best_path",
        ),
        (UNKNOWN,),
        "drafters",
        ("dflash2_full", "dflash2_sliding", "dflash2_causal_scaled"),
    ),
    Row(
        "deepseek-ai DSpark (vanilla, gated, rnn head)",
        "loads, without its frozen copies of the target's tables; DeepSpec's logits within 3e-5, confidence 3e-6",
        "DeepSpec's torch code",
        (PUBLISHED, "test_packagings::test_confidence_logits_are_divided_by_their_slots_temperature"),
        (UNKNOWN, "test_pairing::test_frozen_copies_of_the_targets_tables_are_dropped"),
        "drafters",
        ("dspark", "dspark_gated", "dspark_rnn"),
    ),
    Row(
        "deepseek-ai DSpark for Gemma 4 (`Gemma4DSparkModel`)",
        "as above",
        "DeepSpec's torch code",
        ("test_gemma4::test_proposals_are_those_of_deepspecs_code",),
        ("test_gemma4::test_what_deepspec_has_not_is_refused_in_one_line",),
        "gemma4",
    ),
    Row(
        "RadixArk / SpecForge DSpark (`dflash_config`, `logit_head.`)",
        "as above",
        "the same weights, by the published keys",
        (PUBLISHED, "test_packagings::test_early_specforges_prefix_is_dropped"),
        (UNKNOWN,),
        "drafters",
        ("dspark_yarn",),
    ),
    Row(
        "DSpark of Qwen 3.5's layers (`Qwen35DSparkModel`: gated attention, norms as w − 1, tables of its own)",
        "loads; mlx-dspark's logits within 3e-5",
        "mlx-dspark 0.20.3's code; the files by hand, from the published keys",
        ("test_qwen35::test_proposals_are_those_of_mlx_dspark",),
        ("test_qwen35::test_what_can_not_be_run_is_refused_in_one_line",),
        "qwen35",
    ),
    Row(
        "speculators DFlash (also of a reduced vocabulary)",
        "loads; the logits of the package's forward pass of training within 3e-5",
        "speculators 0.9.0",
        (PACKAGE, "test_speculators::test_causality_is_the_packages_word_or_the_kinds_default"),
        (OPEN,),
        "speculators",
        ("dflash", "dflash_reduced"),
    ),
    Row(
        "speculators DFlash 2",
        "as above",
        "as above",
        (PACKAGE,),
        (OPEN,),
        "speculators",
        ("dflash2",),
    ),
    Row(
        "speculators DSpark (reduced vocabulary, gated, rnn head)",
        "as above, confidence within 3e-6",
        "speculators 0.9.0",
        (PACKAGE, "test_speculators::test_offsets_make_target_ids_and_the_marks_must_agree"),
        (OPEN, "test_speculators::test_offsets_make_target_ids_and_the_marks_must_agree"),
        "speculators",
        ("dspark", "dspark_bidirectional", "dspark_rnn"),
    ),
    Row(
        "LithosAI DSpark in NVFP4 (`dspark_config` or `dflash_config`)",
        "loads, codes stay packed; every code's value computed in the test",
        "by hand, from the published names and layout",
        ("test_packagings::test_nvfp4_codes_propose_as_the_numbers_that_they_stand_for",),
        ("test_packagings::test_nvfp4_without_a_tensor_scale_is_refused_by_name",),
        cases=("dspark_config", "dflash_config"),
    ),
    Row(
        "LiquidAI LFM2.5 DSpark (interleaved rope, own table or head)",
        "loads; a rotation of complex numbers, one by one",
        "by hand, from the published keys",
        (
            "test_packagings::test_interleaved_rope_turns_neighbours_and_neox_rope_halves",
            "test_packagings::test_lfm2_drafters_embed_and_predict_by_the_table_in_their_own_file",
            "test_packagings::test_a_head_beside_the_table_is_the_head",
        ),
        ("test_packagings::test_a_table_of_its_own_that_does_not_fit_is_refused_by_name",),
        cases=("Lfm2DSparkDraftModel",),
    ),
    Row(
        "mlx exports (`quantization`, 4 and 8 bits, per layer)",
        "loads; its dequantized weights' logits within 1e-4",
        "mlx's own quantization in the test",
        ("test_pairing::test_a_quantized_export_proposes_as_its_dequantized_weights_do",),
        (
            "test_pairing::test_codes_that_mlx_does_not_pack_are_refused",
            "test_pairing::test_codes_in_the_place_of_weights_are_refused",
        ),
        cases=("dflash_full", "dspark_yarn"),
    ),
    Row(
        "MTP head in the target's files (`mtp.*`; FP8, FP4 and mlx's codes of any bits stay packed)",
        "loads; the rows of transformers' decoder layer and norms within 1e-5, the same drafts",
        "transformers' `Qwen3_5DecoderLayer`",
        ("test_mtp::test_rows_and_drafts_are_those_of_transformers_layers",),
        (
            "test_mtp::test_a_target_without_a_head_says_so",
            "test_mtp::test_missing_and_extra_tensors_of_a_head_are_listed",
        ),
        "mtp",
    ),
    Row(
        "MTP head in a split repository (`qwen3_5_mtp`: no prefix)",
        "loads; the same head as the target's files",
        "the head above by hand in mlx-vlm's layout",
        ("test_mtp::test_a_split_repository_holds_whole_norms_and_names_without_the_prefix",),
        ("test_mtp::test_a_head_that_does_not_fit_is_refused_before_its_weights_are_read",),
        "mtp",
        ("qwen3_5_mtp",),
    ),
    Row(
        "prompt lookup (`ngram`)",
        "runs; a naive search's proposals",
        "no files",
        ("test_ngram::test_proposals_are_those_of_a_naive_search",),
        ("test_ngram::test_nothing_is_proposed_where_nothing_was_observed", *SETTINGS[1:]),
        cases=("ngram",),
    ),
    Row(
        "mlx-lm language models",
        "loads, if caches can be trimmed and tokens are the same; the drafts of the model alone over the whole text",
        "mlx-lm's `llama` in the test",
        ("test_small_lm::test_drafts_are_the_models_own_whatever_was_accepted_before",),
        (
            "test_small_lm::test_a_directory_loads_where_its_tokens_are_the_targets",
            "test_small_lm::test_a_recurrent_model_and_a_batch_are_refused",
        ),
        cases=("llama",),
    ),
    Row(
        "`--draft-quantize` 8, 4, nvfp4, mxfp4",
        "projections only; the logits of the dequantized weights",
        "the drafters above",
        (
            "test_draft_settings::test_quantized_projections_draft_as_their_dequantized_weights_do",
            "test_draft_settings::test_projections_are_quantized_and_nothing_else",
        ),
        SETTINGS,
        cases=("8", "4", "nvfp4", "mxfp4"),
    ),
    Row(
        "`--draft-vocab`",
        "a full head's drafts, with all other tokens masked",
        "the drafters above",
        (
            "test_draft_settings::test_a_shortlist_drafts_as_a_full_head_that_knows_no_other_tokens",
            "test_draft_settings::test_an_mtp_head_is_shortened_too",
        ),
        SETTINGS,
        cases=("dflash_full", "dspark", "dspark_rnn"),
    ),
    Row(
        "`--draft-markov-top-k`",
        "the whole head's logits of the K tokens",
        "the drafters above",
        ("test_draft_settings::test_markov_biases_of_the_best_tokens_are_those_of_the_whole_head",),
        SETTINGS[1:],
        cases=("dspark", "dspark_gated", "dspark_rnn"),
    ),
    Row(
        "`--draft-window`",
        "the logits of a drafter that saw those rows only",
        "the drafters above",
        ("test_long_context::test_rows_before_the_draft_window_are_not_seen_whether_they_are_still_there_or_not",),
        SETTINGS,
        cases=("dflash_full", "dspark"),
    ),
    Row(
        "EAGLE-3 and other architectures; attention sinks, `use_swa`, log-SNR conditioning, GPTQ",
        "refused by name",
        "by hand, from the published keys",
        (),
        (UNKNOWN,),
        cases=("LlamaEagle3", "use_swa", "attention_sink_bias", "log_snr_conditioning", "gptq"),
    ),
)


if __name__ == "__main__":
    print(table(DRAFTERS))
