"""What `specmlx roofline` prints."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from specmlx.cli.roofline_tables import lane_table, table, tokens, weight_tables
from specmlx.receipts.chips import CHIPS, Chip
from specmlx.receipts.roofline import acceptance_of
from specmlx.receipts.tensors import Group

if TYPE_CHECKING:
    from specmlx.receipts.roofline import Roofline

LONG = 32768
DRAFT = (
    "kind hidden_size intermediate_size vocab_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "block_size selector_rank conv_kernel_size conv_group_size markov_rank"
).split()


@dataclass(frozen=True)
class Question:
    """A round, and what is asked about it; `bandwidth` is GB/s and the chip, where one was named."""

    line: "Roofline"
    model: str
    context: int | None
    tau: float | None
    bandwidth: tuple[float, Chip | None] | None
    claims: list[tuple[float, float]]

    def chips(self) -> list[Chip]:
        """The named chip, a nameless one of the given bandwidth, or the whole table."""
        if self.bandwidth is None:
            return list(CHIPS)
        number, chip = self.bandwidth
        return [chip or Chip("", number, 0)]

    def taus(self) -> list[float]:
        """The acceptance lengths that are shown: the given one, or all whole ones; none without a drafter."""
        if self.line.draft is None:
            return []
        return [float(tau) for tau in range(1, self.line.rows + 1)] if self.tau is None else [self.tau]


def title(asked: Question) -> str:
    line = asked.line
    lanes = "" if line.lanes == 1 else f", {line.lanes} lanes"
    draft = "no draft" if line.draft is None else f"{line.draft.kind} draft, {line.rows} rows a round"
    return f"{asked.model}, {line.scheme.name}, {draft}, KV {line.kv}{lanes}"


def text(asked: Question) -> str:
    """Tables of bytes, then the limits, then the claims."""
    tables = [*weight_tables(asked.line), lane_table(asked.line, asked.context or LONG)]
    claims = [_claims(asked)] if asked.claims else []
    return "\n\n".join([title(asked), *map(table, tables), _rounds(asked), _limits(asked), *claims])


def as_object(asked: Question) -> dict[str, Any]:
    """Everything, for `--json`; bytes are whole numbers."""
    line, context = asked.line, asked.context or 0
    return {
        "model": asked.model,
        "weights": line.scheme.name,
        "layout": "splash" if line.splash else "tensors",
        "draft": line.draft
        and {name: getattr(line.draft, name) for name in DRAFT} | {"taps": len(line.draft.target_layer_ids)},
        "rows": line.rows,
        "lanes": line.lanes,
        "context": context,
        "target": _groups(line.target),
        "drafter": _groups(line.drafter),
        "target_parameters": sum(group.parameters for group in line.target),
        "target_nbytes": sum(group.nbytes for group in line.target),
        "kv": line.kv,
        "kv_token_bytes": line.kv_token_bytes,
        "state_bytes": line.state.nbytes,
        "round_bytes": line.round_bytes(context),
        "round_bytes_without_draft": line.round_bytes(context, drafting=False),
        "multiply_adds": line.multiply_adds(),
        "limits": [_limit(asked, chip) for chip in asked.chips()],
        "claims": [_claim(asked, speed, tau, chip) for speed, tau in asked.claims for chip in asked.chips()],
    }


def _groups(groups: list[Group]) -> list[dict[str, Any]]:
    names = ("label", "kind", "shape", "parameters", "nbytes", "reads")
    return [{name: getattr(group, name) for name in names} for group in groups]


def _limit(asked: Question, chip: Chip) -> dict[str, Any]:
    line, context = asked.line, asked.context or 0
    return {
        "chip": chip.name or None,
        "bandwidth": chip.bandwidth,
        "byte_limit_without_draft": line.ceiling(chip.bandwidth, 1.0, context, drafting=False),
        "by_tau": [
            {
                "tau": tau,
                "byte_limit": line.ceiling(chip.bandwidth, tau, context),
                "arithmetic_limit": line.arithmetic_limit(chip, tau),
            }
            for tau in asked.taus()
        ],
    }


def _claim(asked: Question, speed: float, tau: float, chip: Chip) -> dict[str, Any]:
    claim = asked.line.claim(speed, tau, chip.bandwidth, asked.context or 0)
    return asdict(claim) | {"chip": chip.name or None, "share": claim.share, "impossible": claim.impossible}


def _rounds(asked: Question) -> str:
    line, context = asked.line, asked.context or LONG
    lanes = "one lane" if line.lanes == 1 else f"{line.lanes} lanes"

    def sizes(drafting: bool) -> str:
        short, long = (line.round_bytes(n, drafting) / 1e9 for n in (0, context))
        return f"{short:.2f} GB with a short prompt, {long:.2f} GB at {tokens(context)}"

    plain = f"A pass without a draft, {lanes}: {sizes(False)}."
    if line.draft is None:
        return plain
    embedding = sum(group.nbytes for group in line.target if not group.reads)
    target = f"target {sum(g.nbytes for g in line.target) / 1e9:.3f} − embedding {embedding / 1e9:.3f}"
    if line.config.num_experts:
        target = f"target with at most these experts {line.target_bytes() / 1e9:.3f}"
    return (
        f"One round, {lanes}: {sizes(True)}.\n"
        f"Short: {target} + draft {sum(g.read() for g in line.drafter) / 1e9:.3f} + head a second time "
        f"{line.head.nbytes / 1e9:.3f} + state {line.lanes * line.state.moved / 1e9:.2f}. "
        f"The draft with its head: {line.draft_bytes / 1e9:.2f} GB.\n{plain}"
    )


def _limits(asked: Question) -> str:
    line, context = asked.line, asked.context or 0
    taus = asked.taus()
    where = f"{tokens(context)} tokens of context" if context else "short prompt"
    parts = [
        f"Byte limit in tok/s, {where}: bandwidth / bytes × τ, every weight read once a round whatever its rows.",
    ]
    if taus:
        parts.append(
            f"Beside it the arithmetic limit of {line.rows} rows: {line.multiply_adds() / 1e12:.3f} T multiply-adds a "
            f"round against cores × 128 × clock\n(from public figures; decoding the weights comes on top). "
            "The tensor units of M5 lift it."
        )
    rows = [("chip", "GB/s", "no draft", *(f"τ {tau:.2f}" for tau in taus), "arithmetic", "of byte limit")]
    for chip in asked.chips():
        plain = line.ceiling(chip.bandwidth, 1.0, context, drafting=False)
        limits = [line.ceiling(chip.bandwidth, tau, context) for tau in taus]
        by_alus = line.arithmetic_limit(chip, taus[-1]) if taus else None
        arithmetic = (_no_limit(chip) if taus else "", "")
        if by_alus is not None:
            arithmetic = (f"{by_alus:.1f}", f"{100 * by_alus / limits[-1]:.0f} %")
        figures = [f"{x:.1f}" for x in (plain, *limits)]
        rows.append((chip.name or "given", f"{chip.bandwidth:g}", *figures, *arithmetic))
    parts.append(table(rows))
    if asked.tau is not None and line.rows > 1:
        share = acceptance_of(asked.tau, line.rows - 1)
        parts.append(
            f"τ {asked.tau:.2f} = 1 + {line.rows - 1} × {share:.3f}: that share of the drafted tokens accepted."
        )
    return "\n".join(parts)


def _no_limit(chip: Chip) -> str:
    return "tensor units" if chip.name else "name a chip"


def _claims(asked: Question) -> str:
    total = " aggregate" if asked.line.lanes > 1 else ""
    context = asked.context or 0
    lines, rows = [], [("share of the bus", "GB/s", *(f"{speed:g} at τ {tau:.2f}" for speed, tau in asked.claims))]
    for speed, tau in asked.claims:
        rate = asked.line.claim(speed, tau, None, context).bytes_per_second
        lines.append(f"{speed:g} tok/s{total} at τ {tau:.2f} is {rate / 1e9:.0f} GB/s")
    for chip in asked.chips():
        claims = [asked.line.claim(speed, tau, chip.bandwidth, context) for speed, tau in asked.claims]
        cells = [f"{100 * claim.share:.0f} %{' impossible' if claim.impossible else ''}" for claim in claims]
        rows.append((chip.name or "given", f"{chip.bandwidth:g}", *cells))
    if len(rows) > 2:
        return "\n".join([*lines, table(rows)])
    name, bandwidth, *cells = rows[1]
    bus = f"{bandwidth} GB/s" if name == "given" else f"{bandwidth} GB/s ({name})"
    found = [(said, *cell.partition(" % ")) for said, cell in zip(lines, [f"{c} " for c in cells], strict=True)]
    return "\n".join(f"{said}: {share} % of {bus}{': impossible' if word else ''}" for said, share, _, word in found)
