"""Flags that turn logits into tokens."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from specmlx.cli.flags import json_object
from specmlx.formats.values import option

if TYPE_CHECKING:
    from specmlx.decoding.processors import Processor
    from specmlx.decoding.sampling import Sampler


def _logit_bias(ctx: click.Context, param: click.Parameter, value: str | None) -> dict[int, float] | None:
    parsed = json_object(ctx, param, value)
    try:
        return None if parsed is None else {int(token): float(bias) for token, bias in parsed.items()}
    except (TypeError, ValueError):
        raise click.BadParameter('it must map token ids to numbers, like {"42": -1.5}.') from None


@dataclass(frozen=True)
class SamplingFlags:
    """Everything that turns logits into tokens."""

    temp: float = option(0.0, "Temperature; 0 is greedy.")
    top_p: float = option(1.0, "Keep this probability mass.")
    min_p: float = option(0.0, "Keep what has this share of the top probability.")
    top_k: int = option(0, "Keep this many tokens; 0 is all.")
    min_tokens_to_keep: int = option(1, "How many --min-p always keeps.")
    xtc_probability: float = option(0.0, "How often XTC removes the top choices.")
    xtc_threshold: float = option(0.1, "What counts as a top choice to XTC.")
    seed: int | None = option(None, "Same text every time, with any drafter or none.")
    logit_bias: dict[int, float] | None = option(
        None, 'Like {"42": -1.5}, by token id.', metavar="JSON", callback=_logit_bias
    )
    repetition_penalty: float | None = option(None, "Divides the logits of repeated tokens.")
    repetition_context_size: int = option(20, "Tokens looked back at; 0 is all.")
    presence_penalty: float | None = option(None, "Subtracted once from tokens that occurred.")
    presence_context_size: int = option(20)
    frequency_penalty: float | None = option(None, "Subtracted for each time a token occurred.")
    frequency_context_size: int = option(20)

    def sampler(self, tokenizer: Any = None) -> "Sampler":
        """XTC spares line ends and stop tokens once the tokenizer is known, as in mlx_lm. Raises ValueError."""
        from specmlx.decoding.sampling import make_sampler

        names = ("temp", "top_p", "min_p", "min_tokens_to_keep", "top_k", "xtc_probability", "xtc_threshold")
        sampler = make_sampler(**{name: getattr(self, name) for name in names})
        if tokenizer is None:
            return sampler
        return replace(sampler, xtc_special_tokens=(*tokenizer.encode("\n"), *tokenizer.eos_token_ids))

    def processor_settings(self) -> dict[str, Any]:
        """Keywords of specmlx's and of mlx_lm's make_logits_processors."""
        kinds = ("repetition", "presence", "frequency")
        names = [f"{kind}_{what}" for kind in kinds for what in ("penalty", "context_size")]
        return {name: getattr(self, name) for name in ("logit_bias", *names)}

    def processors(self) -> "list[Processor]":
        """Raises ValueError for bad values."""
        from specmlx.decoding.processors import make_logits_processors

        return make_logits_processors(**self.processor_settings())

    def check(self, repeatable: bool = False) -> None:
        """Raise ValueError for bad values: to be called before a model is loaded.

        repeatable: UsageError, too, where two decodings would draw different tokens.
        """
        if repeatable and self.temp > 0 and self.seed is None:
            raise click.UsageError("--temp needs --seed: without one, two decodings draw different tokens.")
        self.sampler()
        self.processors()
