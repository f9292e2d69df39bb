"""What lanes save: target passes and speed with 1, 2, 4 and 8 of them, beside mlx-lm's own batches.

    python benchmarks/batch.py [--questions 16] [--runs 5] [--json]
"""



from specmlx import batch_generate

LANES = (1, 2, 4, 8)


def ours(model, tokenizer, prompts, lanes, drafter):
    from specmlx import load_drafter

    drafter = load_drafter(drafter, model) if drafter else None
    found = batch_generate(
        model,
        tokenizer,
        prompts,
        max_tokens=96,
        max_lanes=lanes,
        draft_model=drafter,
        num_draft_tokens=drafter.max_width if drafter else None,
    )
    return found.texts, found.stats.generation_tps, found.stats.passes / found.stats.generation_tokens


def mlx_lm(model, tokenizer, prompts, lanes, _):
    from mlx_lm import batch_generate as theirs

    found = theirs(model, tokenizer, prompts, max_tokens=96, completion_batch_size=lanes, prefill_batch_size=lanes)
    return found.texts, found.stats.generation_tps, found.stats.generation_steps / found.stats.generation_tokens
