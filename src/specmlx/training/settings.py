"""The settings of a training."""

from dataclasses import dataclass
from typing import Any

from specmlx.formats.values import option


@dataclass(frozen=True)
class Settings:
    """All that the weights depend on; lengths in tokens, rates per step.

    steps: None until `minutes` have been turned into steps. config: the drafter's config.json. data, target: what the
    rows and the target's weights are known by, filled in by `Run`.
    """

    config: dict[str, Any]
    steps: int | None = 1000
    minutes: float | None = None
    init: str | None = None
    learning_rate: float = option(1e-3, "Peak; default: by the model's width.", least=0)
    warmup: int = 50
    batch_size: int = option(16, "Sequences in a batch.", least=1)
    accumulate: int = option(1, "Batches in a step.", least=1)
    anchors: int = option(12, "Blocks of a sequence that a step learns from.", least=1)
    grad_checkpoint: bool = option(False, "Less memory: gradients run each layer again.")
    max_length: int = option(1024, "Most tokens of a sequence.", least=8)
    max_tokens: int = option(256, "Most tokens of an answer; -1 is no limit.", names=("-m",))
    temp: float = option(0.0, "Temperature of the target's answers; 0 is greedy.", least=0)
    chat_template_config: dict[str, Any] | None = None
    pool: int = 64
    repeats: int = 2
    seed: int = option(0)
    checkpoint_every: int = option(100, least=1, metavar="STEPS")
    data: str = ""
    target: str = ""
