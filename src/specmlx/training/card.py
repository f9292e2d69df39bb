"""The end of a training: τ by real decoding on held-out rows, the drafter's files, its model card."""

import platform
import shlex
from collections.abc import Sequence
from importlib.metadata import version

from specmlx import __version__
from specmlx.decoding.sampling import make_sampler
from specmlx.evaluation.evaluation import Acceptance, evaluate
from specmlx.training.run import Run

MOST = 40


def finish(run: Run, arguments: Sequence[str], data: str, verifier: str) -> str:
    """Measure the drafter, and write it with its card to the run's `out`; one line that sums it up."""
    s = run.settings
    rows = [row for row in run.kept if row.text is None][:MOST]
    prompts = [row.ids(run.tokenizer, s.chat_template_config) for row in rows]
    options = dict(sampler=make_sampler(s.temp), seed=s.seed) if s.temp else {}
    total = Acceptance()
    for _, found in evaluate(
        run.model, run.tokenizer, run.drafter, prompts, [""] * len(prompts), max_tokens=s.max_tokens, **options
    ):
        total += found
    run.save(_card(run, total, arguments, data), verifier)
    if not total.prompts:
        return f"{run.out}: no held-out prompt to decode, so not measured"
    same = f"{total.identical} of {total.prompts} texts identical"
    measured = f"{total.sums.acceptance_length:.2f} tokens per pass on {total.prompts} held-out prompts"
    return f"{run.out}: {measured}, {same} to plain decoding"


def _card(run: Run, total: Acceptance, arguments: Sequence[str], data: str) -> str:
    s, kind = run.settings, run.drafter.config.kind
    sampling = f"temperature {s.temp}, seed {s.seed}" if s.temp else "greedy"
    versions = ", ".join(f"{name} {version(name)}" for name in ("mlx", "mlx-lm"))
    begun = f", begun with {s.init}" if s.init else ""
    machine = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    measured = "Not measured: no prompt was held out."
    if total.prompts:
        slots = ", ".join(f"{share:.2f}" for share in total.slots())
        measured = f"""Measured by decoding {total.prompts} held-out prompts ({sampling}, full width):
  **{total.sums.acceptance_length:.2f} tokens per pass** of the target (τ);
  slots kept where those before them were: {slots};
  {total.identical} of {total.prompts} texts identical to plain decoding's."""
    return f"""---
library_name: mlx
tags: [speculative-decoding, {kind}]
---

# {kind} drafter

Guesses tokens for the target that it was trained on, which checks every one of them: text does not change.

- Data: {data}, {len(run.learned)} rows learned, {len(run.kept)} held out; answers are the target's own ({sampling}).
- Training: {s.steps} steps of {s.batch_size * s.accumulate} sequences, {s.anchors} blocks of each, peak rate
  {s.learning_rate}{begun}.
- {measured}
- Made with specmlx {__version__}, {versions}, {machine}:

      specmlx {shlex.join(arguments)}
"""
