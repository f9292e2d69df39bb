"""Flags that turn logits into tokens."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from specmlx.cli.flags import grouped, json_object
from specmlx.cli.options import checked

if TYPE_CHECKING:
    from specmlx.speculation.processors import Processor
    from specmlx.speculation.sampling import Sampler


@dataclass(frozen=True)
class SamplingFlags:
    """Everything that turns logits into tokens."""

    temp: float
    top_p: float
    min_p: float
    top_k: int
    min_tokens_to_keep: int
    xtc_probability: float
    xtc_threshold: float
    seed: int | None
    logit_bias: dict[int, float] | None
    repetition_penalty: float | None
    repetition_context_size: int
    presence_penalty: float | None
    presence_context_size: int
    frequency_penalty: float | None
    frequency_context_size: int

    def sampler(self, tokenizer: Any = None) -> "Sampler":
        """XTC spares line ends and stop tokens once the tokenizer is known, as in mlx_lm. Raises ValueError."""
        from specmlx.speculation.sampling import make_sampler

        sampler = make_sampler(
            temp=self.temp,
            top_p=self.top_p,
            min_p=self.min_p,
            min_tokens_to_keep=self.min_tokens_to_keep,
            top_k=self.top_k,
            xtc_probability=self.xtc_probability,
            xtc_threshold=self.xtc_threshold,
        )
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
        from specmlx.speculation.processors import make_logits_processors

        return make_logits_processors(**self.processor_settings())

    def check(self) -> None:
        """Raise ValueError for bad values: to be called before a model is loaded."""
        self.sampler()
        self.processors()


def _logit_bias(ctx: click.Context, param: click.Parameter, value: str | None) -> dict[int, float] | None:
    parsed = json_object(ctx, param, value)
    try:
        return None if parsed is None else {int(token): float(bias) for token, bias in parsed.items()}
    except (TypeError, ValueError):
        raise click.BadParameter('it must map token ids to numbers, like {"42": -1.5}.') from None


sampling_options = grouped(
    "sampling",
    SamplingFlags,
    click.option("--temp", type=float, default=0.0, show_default=True, help="Temperature; 0 is greedy."),
    click.option("--top-p", type=float, default=1.0, show_default=True, help="Keep this probability mass."),
    click.option("--min-p", type=float, default=0.0, help="Keep what has this share of the top probability."),
    click.option("--top-k", type=int, default=0, help="Keep this many tokens; 0 is all."),
    click.option("--min-tokens-to-keep", type=int, default=1, help="How many --min-p always keeps."),
    click.option("--xtc-probability", type=float, default=0.0, help="How often XTC removes the top choices."),
    click.option("--xtc-threshold", type=float, default=0.1, help="What counts as a top choice to XTC."),
    click.option("--seed", type=int, callback=checked, help="Same text every time, with any drafter or none."),
    click.option("--logit-bias", metavar="JSON", callback=_logit_bias, help='Like {"42": -1.5}, by token id.'),
    click.option("--repetition-penalty", type=float, help="Divides the logits of repeated tokens."),
    click.option("--repetition-context-size", type=int, default=20, help="Tokens looked back at; 0 is all."),
    click.option("--presence-penalty", type=float, help="Subtracted once from tokens that occurred."),
    click.option("--presence-context-size", type=int, default=20),
    click.option("--frequency-penalty", type=float, help="Subtracted for each time a token occurred."),
    click.option("--frequency-context-size", type=int, default=20),
)
