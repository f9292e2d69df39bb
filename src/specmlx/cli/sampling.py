"""Flags that turn logits into tokens."""

from dataclasses import dataclass, replace
from typing import Any

import click

from specmlx.cli.flags import arguments, json_object
from specmlx.decoding.processors import make_logits_processors
from specmlx.decoding.sampling import make_sampler
from specmlx.formats.values import option


def _logit_bias(value: str) -> dict[int, float]:
    try:
        return {int(token): float(bias) for token, bias in json_object(value).items()}
    except (TypeError, ValueError):
        raise click.BadParameter('it must map token ids to numbers, like {"42": -1.5}.') from None


@dataclass(frozen=True)
class SamplingFlags:
    """What turns logits into tokens: `seed`, and keywords of `make_sampler` and `make_logits_processors`."""

    temp: float = option(0.0, "Temperature; 0 is greedy.")
    top_p: float = option(1.0, "Keep this probability mass.")
    min_p: float = option(0.0, "Keep what has this share of the top probability.")
    top_k: int = option(0, "Keep this many tokens; 0 is all.")
    min_tokens_to_keep: int = option(1, "How many --min-p always keeps.")
    xtc_probability: float = option(0.0, "How often XTC removes the top choices.")
    xtc_threshold: float = option(0.1, "What counts as a top choice to XTC.")
    seed: int | None = option(None, "Same text every time, with any drafter or none.")
    logit_bias: dict[int, float] | None = option(
        None, 'Like {"42": -1.5}, by token id.', metavar="JSON", type=_logit_bias
    )
    repetition_penalty: float | None = option(None, "Divides the logits of repeated tokens.")
    repetition_context_size: int = option(20, "Tokens looked back at; 0 is all.")
    presence_penalty: float | None = option(None, "Subtracted once from tokens that occurred.")
    presence_context_size: int = option(20)
    frequency_penalty: float | None = option(None, "Subtracted for each time a token occurred.")
    frequency_context_size: int = option(20)

    def options(self, tokenizer: Any) -> dict[str, Any]:
        """`stream_generate`'s keywords. XTC spares line ends and stop tokens, as in mlx_lm. Raises ValueError."""
        sampler = make_sampler(**arguments(make_sampler, self))
        if tokenizer is not None:
            sampler = replace(sampler, xtc_special_tokens=(*tokenizer.encode("\n"), *tokenizer.eos_token_ids))
        processors = make_logits_processors(**self.processors())
        return {"seed": self.seed, "sampler": sampler, "logits_processors": processors}

    def processors(self) -> dict[str, Any]:
        """Keywords of specmlx's and of mlx_lm's make_logits_processors."""
        return arguments(make_logits_processors, self)

    def check(self, repeatable: bool = False) -> None:
        """Raise ValueError for bad values: to be called before a model is loaded.

        repeatable: UsageError, too, where two decodings would draw different tokens.
        """
        if repeatable and self.temp > 0 and self.seed is None:
            raise click.UsageError("--temp needs --seed: without one, two decodings draw different tokens.")
        self.options(None)
