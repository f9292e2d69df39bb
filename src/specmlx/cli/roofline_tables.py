"""The tables of `specmlx roofline`: bytes by tensor or by format, as the articles on two engines print them."""

from specmlx.cli.tables import Row
from specmlx.evaluation.roofline import Roofline
from specmlx.evaluation.tensors import Group
from specmlx.formats.sizes import Format

HEADER = ("tensor", "shape", "MB each", "count", "reads", "GB")


def weight_tables(line: Roofline) -> list[list[Row]]:
    """The target's tensors, by shape where they are all in one format and else by format; then the drafter's."""
    if line.scheme.mixed:
        tables = [_by_format(line)]
    else:
        parameters, nbytes = (sum(getattr(g, name) for g in line.target) for name in ("parameters", "nbytes"))
        bits = f"{parameters:,} parameters at {8 * nbytes / parameters:.4f} bits"
        rows = [_row(group, line.draft is not None, line.lanes * line.rows) for group in line.target]
        tables = [[HEADER, *rows, ("target total", bits, "", "", "", f"{nbytes / 1e9:.3f}")]]
    if line.draft is not None:
        total = f"{sum(group.nbytes for group in line.drafter if group.reads) / 1e9:.3f}"
        last = ("draft total", "no head of its own: it runs the target's", "", "", "", total)
        tables.append([HEADER, *map(_row, line.drafter), last])
    return tables


def lane_table(line: Roofline, context: int) -> list[Row]:
    """What each conversation adds to a round: its keys and values at `context`, its recurrent state."""

    def mib(nbytes: int) -> str:
        return f"{nbytes / 2**20:.3g} MiB"

    state, token = line.state, line.kv_token_bytes
    scaled = " + fp32 scale per token, head, K/V" if line.kv == "int8" else ""
    each = f"{token:,} B ({token / 1024:.4g} KiB) a token"
    conv = state.conv_layer_bytes / 1024
    shape = f"{' × '.join(map(str, state.shape))} ({mib(state.recurrent_bytes)})"
    inputs = f"conv inputs {state.shape[0]} × {conv:.4g} KiB ({mib(state.conv_bytes)})"
    rows = [
        ("each lane", "", "bytes", "", "GB"),
        (f"KV cache, {line.kv}{scaled}", each, "", f"at {tokens(context)}", f"{token * context / 1e9:.2f}"),
    ]
    if line.splash:
        whole = f"{shape} + {inputs}"
        return [*rows, ("GDN state fp32", whole, mib(state.nbytes), "read + written", f"{state.moved / 1e9:.2f}")]
    for name, what, nbytes in (("GDN state fp32", shape, state.recurrent_bytes), ("", inputs, state.conv_bytes)):
        rows.append((name, what, f"{nbytes / 1e6:.0f} MB", "read + written", f"{2 * nbytes / 1e9:.3f}"))
    return rows


def round_lines(line: Roofline, context: int) -> str:
    """The bytes of a round with a short prompt and at `context`, and what they are made of."""
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


def tokens(n: int) -> str:
    """Like 32K for 32,768."""
    return f"{n // 1024}K" if n and n % 1024 == 0 else f"{n:,}"


def _row(group: Group, drafted: bool = False, rows: int = 1) -> Row:
    reads = _reads(group, drafted, rows)
    # Vectors come once a layer, and a few at the end: those count in the sum only.
    parts = [part for part in group.parts if part.label and group.kind == "small"] or group.parts[:1]
    # A drafter's layer sums up matrices of many shapes.
    digits = 1 if len(parts[0].tensors) > 5 and group.rows else 2
    each = ", ".join(f"{part.nbytes / 1e6:.{digits}f} {part.label if len(parts) > 1 else ''}".strip() for part in parts)
    # Two digits, three for less than 0.01 GB.
    size = f"{group.nbytes / 1e9:.{2 if group.nbytes >= 1e7 else 3}f}"
    return group.label, group.shape, each, str(sum(part.count for part in parts)), reads, size


def _reads(group: Group, drafted: bool, rows: int) -> str:
    if group.share < 1:
        return f"≤ {min(1.0, rows * group.share):.2f}"
    return str(group.reads + (drafted and group.kind == "vocabulary head"))


def _by_format(line: Roofline) -> list[Row]:
    kinds = {kind: line.scheme.mlp for kind in ("experts", "MLP gate/up/down")}
    kinds |= dict.fromkeys(("GDN projections", "attention projections"), line.scheme.mixer)
    rows, small = [("group", "format", "reads", "GB")], 0
    for kind, fmt in kinds.items():
        groups = [group for group in line.target if group.kind == kind]
        if not groups:
            continue
        codes, scales, rest = _split(groups, fmt)
        small += rest
        reads = _reads(groups[0], False, line.lanes * line.rows)
        coded = f"{fmt.name.upper()} codes" if scales else fmt.name.upper()
        rows.append((f"{kind}, {groups[0].parts[0].count} layers", coded, reads, f"{codes / 1e9:.3f}"))
        if scales:
            rows.append((f"{kind.split()[0]} block scales", f"E4M3 per {fmt.group}", reads, f"{scales / 1e9:.3f}"))
    small += sum(group.nbytes for group in line.target if group.kind in ("small", "router"))
    head = f"{line.scheme.head.name.upper()} + scales"
    rows += [
        ("small bf16 tensors (a, b projections, norms, conv)", "bf16", "1", f"{small / 1e9:.3f}"),
        ("vocabulary head", head, "2" if line.draft else "1", f"{line.head.nbytes / 1e9:.3f}"),
        ("read on every pass", "", "", f"{line.target_bytes() / 1e9:.3f}"),
    ]
    gathered = [group for group in line.target if not group.reads]
    name, fmt = "token embedding (one row gathered)", line.scheme.embedding.name
    return [*rows, *((name, fmt, "0", f"{group.nbytes / 1e9:.3f}") for group in gathered)]


def _split(groups: list[Group], fmt: Format) -> tuple[int, int, int]:
    """Bytes of codes, of group scales, and of what is in another format or is one scale a matrix."""
    codes = scales = rest = 0
    for part in (part for group in groups for part in group.parts):
        for shape, own in part.tensors:
            if own != fmt:
                rest += own.nbytes(shape) * part.count
                continue
            codes += fmt.code_bytes(shape) * part.count
            scales += (fmt.all_scale_bytes(shape) - fmt.tensor_scale_bytes) * part.count
            rest += fmt.tensor_scale_bytes * part.count
    return codes, scales, rest
