"""What `specmlx roofline` prints."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from specmlx.cli.roofline_tables import lane_table, tokens, weight_tables
from specmlx.cli.tables import table
from specmlx.evaluation.chips import Chip
from specmlx.evaluation.tensors import Group

if TYPE_CHECKING:
    from specmlx.cli.roofline import RooflineFlags

LONG = 32768
DRAFT = (
    "kind hidden_size intermediate_size vocab_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "block_size selector_rank conv_kernel_size conv_group_size markov_rank"
).split()


def title(flags: "RooflineFlags") -> str:
    line = flags.line
    draft = "no draft" if line.draft is None else f"{line.draft.kind} draft, {line.rows} rows a round"
    lanes = "" if line.lanes == 1 else f", {line.lanes} lanes"
    return f"{flags.model}, {line.scheme.name}, {draft}, KV {line.kv}{lanes}"


def text(flags: "RooflineFlags") -> str:
    """Tables of bytes, then the limits, then the claims."""
    tables = [*weight_tables(flags.line), lane_table(flags.line, flags.context or LONG)]
    claims = [_claims(flags)] if flags.claims else []
    return "\n\n".join([title(flags), *map(table, tables), _rounds(flags), _limits(flags), *claims])


def as_object(flags: "RooflineFlags") -> dict[str, Any]:
    """Everything, for `--json`; bytes are whole numbers."""
    line, context, draft = flags.line, flags.context or 0, flags.line.draft
    return {
        "model": flags.model,
        "weights": line.scheme.name,
        "layout": "splash" if line.splash else "tensors",
        "draft": draft and {n: getattr(draft, n) for n in DRAFT} | {"taps": len(draft.target_layer_ids)},
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
        "limits": [_limit(flags, chip) for chip in flags.bandwidth],
        "claims": [_claim(flags, speed, tau, chip) for speed, tau in flags.claims for chip in flags.bandwidth],
    }


def _groups(groups: list[Group]) -> list[dict[str, Any]]:
    names = ("label", "kind", "shape", "parameters", "nbytes", "reads")
    return [{name: getattr(group, name) for name in names} for group in groups]


def _limit(flags: "RooflineFlags", chip: Chip) -> dict[str, Any]:
    plain, by_tau = _ceilings(flags, chip)
    alus = [flags.line.arithmetic_limit(chip, tau) for tau in flags.taus]
    rows = zip(flags.taus, by_tau, alus, strict=True)
    by_tau = [{"tau": tau, "byte_limit": limit, "arithmetic_limit": other} for tau, limit, other in rows]
    name = {"chip": chip.name or None, "bandwidth": chip.bandwidth}
    return name | {"byte_limit_without_draft": plain, "by_tau": by_tau}


def _ceilings(flags: "RooflineFlags", chip: Chip) -> tuple[float, list[float]]:
    """The byte limit of plain decoding, and those of the tokens per pass."""
    line, context = flags.line, flags.context or 0
    plain = line.ceiling(chip.bandwidth, 1.0, context, drafting=False)
    return plain, [line.ceiling(chip.bandwidth, tau, context) for tau in flags.taus]


def _claim(flags: "RooflineFlags", speed: float, tau: float, chip: Chip) -> dict[str, Any]:
    claim = flags.line.claim(speed, tau, chip.bandwidth, flags.context or 0)
    return asdict(claim) | {"chip": chip.name or None, "share": claim.share, "impossible": claim.impossible}


def _rounds(flags: "RooflineFlags") -> str:
    line, context = flags.line, flags.context or LONG
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


def _limits(flags: "RooflineFlags") -> str:
    line, taus = flags.line, flags.taus
    where = f"{tokens(flags.context)} tokens of context" if flags.context else "short prompt"
    parts = [
        f"Byte limit in tok/s, {where}: bandwidth / bytes × tokens per pass, every weight read once a round whatever "
        "its rows."
    ]
    if taus:
        parts.append(
            f"Beside it the arithmetic limit of {line.rows} rows: {line.multiply_adds() / 1e12:.3f} T multiply-adds a "
            "round against cores × 128 × clock\n(from public figures; decoding the weights comes on top). "
            "The tensor units of M5 lift it."
        )
    rows = [("chip", "GB/s", "no draft", *(f"at {tau:.2f}" for tau in taus), "arithmetic", "of byte limit")]
    for chip in flags.bandwidth:
        plain, limits = _ceilings(flags, chip)
        by_alus = line.arithmetic_limit(chip, taus[-1]) if taus else None
        arithmetic = ("" if not taus else "tensor units" if chip.name else "name a chip", "")
        if by_alus is not None:
            arithmetic = (f"{by_alus:.1f}", f"{100 * by_alus / limits[-1]:.0f} %")
        rows.append((*_name(chip), *(f"{x:.1f}" for x in (plain, *limits)), *arithmetic))
    parts.append(table(rows))
    if flags.tau is not None and line.rows > 1:
        slots = line.rows - 1
        share = f"{flags.tau:.2f} = 1 + {slots} × {(flags.tau - 1) / slots:.3f}"
        parts.append(f"{share} tokens per pass: that share of the drafted tokens accepted.")
    return "\n".join(parts)


def _name(chip: Chip) -> tuple[str, str]:
    return chip.name or "given", f"{chip.bandwidth:g}"


def _claims(flags: "RooflineFlags") -> str:
    """One chip has its share behind each claim, several have a table."""
    total = " aggregate" if flags.line.lanes > 1 else ""
    claims = {
        (speed, tau): [flags.line.claim(speed, tau, chip.bandwidth, flags.context or 0) for chip in flags.bandwidth]
        for speed, tau in flags.claims
    }
    lines = [
        f"{speed:g} tok/s{total} at {tau:.2f} tokens per pass is {found[0].bytes_per_second / 1e9:.0f} GB/s"
        for (speed, tau), found in claims.items()
    ]
    if len(flags.bandwidth) == 1:
        (chip,) = flags.bandwidth
        bus = f"{chip.bandwidth:g} GB/s{f' ({chip.name})' if chip.name else ''}"
        return "\n".join(
            f"{said}: {100 * claim.share:.0f} % of {bus}{': impossible' if claim.impossible else ''}"
            for said, (claim,) in zip(lines, claims.values(), strict=True)
        )
    rows = [("share of the bus", "GB/s", *(f"{speed:g} at {tau:.2f}" for speed, tau in claims))]
    for chip, *found in zip(flags.bandwidth, *claims.values(), strict=True):
        rows.append((*_name(chip), *(f"{100 * c.share:.0f} %{' impossible' if c.impossible else ''}" for c in found)))
    return "\n".join([*lines, table(rows)])
