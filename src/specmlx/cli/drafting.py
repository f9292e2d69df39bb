"""Flags of the drafter that several commands share."""

from dataclasses import dataclass

import click

from specmlx.cli.flags import grouped


@dataclass(frozen=True)
class DraftFlags:
    """What makes drafting cheaper; the fields are those of `drafters.settings.DraftSettings`."""

    draft_window: int | None = None
    draft_quantize: str | None = None
    draft_vocab: int | None = None
    draft_vocab_file: str | None = None
    draft_markov_top_k: int | None = None


draft_options = grouped(
    "drafting",
    DraftFlags,
    click.option(
        "--draft-window",
        type=click.IntRange(min=1),
        metavar="N",
        help="Tokens that a block drafter looks back at; default: its config's, 4096 for layers that have none.",
    ),
    click.option(
        "--draft-quantize",
        type=click.Choice(["4", "8", "nvfp4", "mxfp4", "none"]),
        help="The drafter's projections in so many bits; default: 4 on Metal, none elsewhere.",
    ),
    click.option(
        "--draft-vocab",
        type=click.IntRange(min=1),
        metavar="N",
        help="The drafter's head for the N most frequent tokens only.",
    ),
    click.option(
        "--draft-vocab-file",
        metavar="FILE",
        help="JSON list of token ids, the most frequent first; default: token_frequencies.json beside the models.",
    ),
    click.option(
        "--draft-markov-top-k",
        type=click.IntRange(min=1),
        metavar="K",
        help="DSpark: the Markov bias of a slot's K best tokens only; the others are not drafted.",
    ),
)
