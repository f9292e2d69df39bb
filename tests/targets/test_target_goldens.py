"""Our target against transformers' Qwen3_5ForCausalLM: see goldens/make_target_goldens.py."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from specmlx.targets.checkpoint import load_target

GOLDENS = Path(__file__).parents[1] / "goldens"
# How the rows go in: a prompt, three single steps, a verify of eight, and more prompt.
PARTS = [("prefill", 150), ("verify", 1), ("verify", 1), ("verify", 1), ("verify", 8), ("prefill", 65)]


def run(model, tokens: np.ndarray, tap_ids: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Logits [N, V] and taps [N, F] of all rows, fed part by part into one conversation."""
    states = model.new_states()
    logits, features, start = [], [], 0
    for kind, rows in PARTS:
        part = mx.array(tokens[start : start + rows])[None]
        start += rows
        if kind == "prefill":
            for _, taps in model.prefill(states, part, tap_ids):
                # Prefill computes no logits: they are the head of the last layer's tap, normed.
                last = taps[..., -model.args.hidden_size :]
                logits.append(model.lm_head(model.model.norm(last)))
                features.append(taps)
        else:
            verified = model.verify(states, part, tap_ids)
            states.commit(rows)
            logits.append(verified.logits)
            features.append(verified.features)
    assert start == len(tokens)
    return tuple(np.array(mx.concatenate(x, axis=1)[0]) for x in (logits, features))


@pytest.mark.parametrize(("name", "atol"), [("target_untied", 1e-4), ("target_tied", 5e-4)])
def test_logits_and_taps_are_those_of_transformers(name, atol):
    expected = {k: np.array(v) for k, v in mx.load(str(GOLDENS / name / "expected.safetensors")).items()}
    tap_ids = tuple(sorted(int(k.split(".")[1]) for k in expected if k.startswith("tap.")))
    model, _ = load_target(GOLDENS / name / "checkpoint")
    assert tap_ids[-1] == model.args.num_hidden_layers - 1

    logits, features = run(model, expected["tokens"], tap_ids)

    want = np.concatenate([expected[f"tap.{i}"] for i in tap_ids], axis=-1)
    np.testing.assert_allclose(features, want, rtol=0, atol=1e-4)
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=atol)
    np.testing.assert_array_equal(logits.argmax(-1), expected["logits"].argmax(-1))
