"""The blocks that DeepSpec's DSpark models draft behind rows that become known little by little."""

import torch
from transformers import DynamicCache


def draft(
    model: torch.nn.Module, features: torch.Tensor, rows: list[int], anchors: list[int], mask: int
) -> dict[str, torch.Tensor]:
    """By round, of which each commits some `rows` of the taps `features` [N, F] before its anchor: logits
    [rounds, block, V], tokens and confidence [rounds, block], greedily."""
    cache, start = DynamicCache(), 0
    found = {"logits": [], "tokens": [], "confidence": []}
    for count, anchor in zip(rows, anchors, strict=True):
        end = start + count
        ids = torch.tensor([[anchor] + [mask] * (model.block_size - 1)])
        # DeepSpec's forward_dspark_draft_block, whose cache.crop(start) transformers 5.24 no longer takes.
        hidden = model._forward_backbone(
            target_hidden_states=features[None, start:end].float(),
            noise_embedding=model.embed_tokens(ids),
            position_ids=torch.arange(start, end + model.block_size)[None],
            attention_mask=None,
            past_key_values=cache,
            use_cache=True,
            is_causal=False,
        )
        cache.crop(-model.block_size)
        start = end
        tokens, logits = model.sample_draft_tokens(
            model.compute_logits(hidden), first_prev_token_ids=ids[:, 0], temperature=0.0, hidden_states=hidden
        )
        previous = torch.cat([ids[:, :1], tokens[:, :-1]], dim=1)
        found["logits"].append(logits[0])
        found["tokens"].append(tokens[0].int())
        found["confidence"].append(model.predict_confidence_step(hidden, prev_token_ids=previous)[0].sigmoid())
    return {what: torch.stack(values).contiguous() for what, values in found.items()}
