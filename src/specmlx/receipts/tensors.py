"""The tensors of a target and a drafter in groups, with their bytes, from shapes and formats alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from specmlx.formats.sizes import FORMATS, Format, affine, format_named
from specmlx.receipts.geometry import DFLASH2, DSPARK, DraftGeometry, layers_of
from specmlx.targets.config import HybridConfig

BF16, FP32 = FORMATS["bf16"], FORMATS["fp32"]
MODELOPT = "modelopt-nvfp4"
Tensor = tuple[tuple[int, ...], Format]


@dataclass(frozen=True)
class Part:
    """`count` times the same tensors."""

    tensors: tuple[Tensor, ...]
    count: int = 1
    label: str = ""

    @property
    def parameters(self) -> int:
        """Of one."""
        return sum(prod(shape) for shape, _ in self.tensors)

    @property
    def nbytes(self) -> int:
        """Of one."""
        return sum(fmt.nbytes(shape) for shape, fmt in self.tensors)


@dataclass(frozen=True)
class Group:
    """Tensors of one kind.

    reads: how often a round reads them; 0 where single rows are gathered.
    rows: which rows they are multiplied with: the verify pass's ("verify"), the drafter's block ("block"), the drafted
        slots ("slots"), or none ("").
    share: the part that one row chooses of a mixture's experts, 1 for all other tensors.
    """

    label: str
    shape: str
    parts: tuple[Part, ...]
    kind: str
    reads: int = 1
    rows: str = "verify"
    share: float = 1.0

    @property
    def parameters(self) -> int:
        return sum(part.parameters * part.count for part in self.parts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes * part.count for part in self.parts)

    def read(self, rows: int = 1) -> int:
        """Bytes that a round reads; of a mixture's experts as many as so many rows can choose, at most."""
        return round(self.nbytes * self.reads * min(1.0, rows * self.share))


@dataclass(frozen=True)
class Scheme:
    """Which format each kind of tensor is in.

    small: the GDN's a and b projections. gated_norm: of the GDN's output. drafter: its matrices.
    """

    name: str
    mlp: Format
    mixer: Format
    small: Format
    head: Format
    embedding: Format
    drafter: Format
    gated_norm: Format = BF16

    @property
    def router(self) -> Format:
        """Of a mixture's router and shared gate, which are kept finer: mlx-lm leaves them 8 bits."""
        return affine(8) if self.mlp.name.startswith("affine") else self.small

    @property
    def mixed(self) -> bool:
        return len({fmt.name for fmt in (self.mlp, self.mixer, self.small, self.head, self.embedding)}) > 1


def scheme_named(name: str) -> Scheme:
    """One format for all matrices, or ModelOpt's mix: MLP and head NVFP4, projections FP8, the rest bfloat16.

    Qwen publishes the gated norms in float32 (3.5), and ModelOpt leaves them. Raises ValueError for an unknown name.
    """
    if name == MODELOPT:
        nvfp4, fp8 = FORMATS["nvfp4"], FORMATS["fp8"]
        return Scheme(name, nvfp4, fp8, BF16, nvfp4, BF16, nvfp4, gated_norm=FP32)
    fmt = format_named(name, [MODELOPT])
    return Scheme(fmt.name, *6 * [fmt])


def target_groups(config: HybridConfig, scheme: Scheme, pad_rows: int = 1) -> list[Group]:
    """A hybrid's tensors; `pad_rows`: a GDN layer's packed input rows are padded to a multiple of it."""
    D, V = config.hidden_size, config.vocab_size
    gdn, full = layers_of(config)
    Hv, Dk, Dv = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
    values = Hv * Dv
    channels = 2 * config.linear_num_key_heads * Dk + values
    rows = channels + values + 2 * Hv
    padding = -rows % pad_rows
    heads, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    attention = ((2 * heads, D), (kv, D), (kv, D))

    inputs = [((channels, D), scheme.mixer), ((values, D), scheme.mixer), *2 * [((Hv, D), scheme.small)]]
    inputs += [((padding, D), scheme.mixer)] if padding else []
    norms = ((D,), BF16), ((D,), BF16)
    gdn_vectors = (
        *norms,
        ((channels, config.linear_conv_kernel_dim), BF16),
        ((Hv,), FP32),
        ((Hv,), FP32),
        ((Dv,), scheme.gated_norm),
    )
    attention_vectors = (*norms, ((config.head_dim,), BF16), ((config.head_dim,), BF16))
    padded = f" ({rows:,} rows padded to {rows + padding:,})" if padding else ""

    def matrices(label: str, shapes: Sequence[tuple[int, int]], fmt: Format, count: int, kind: str) -> Group:
        return Group(label, shapes_text(shapes), (Part(tuple((s, fmt) for s in shapes), count),), kind)

    return [
        Group(
            f"GDN in-projection{padded}",
            f"{rows + padding} × {D}",
            (Part(tuple(inputs), gdn),),
            "GDN projections",
        ),
        matrices("GDN out-projection", [(D, values)], scheme.mixer, gdn, "GDN projections"),
        Group(
            "attention in-projection q, gate, k, v",
            f"{2 * heads + 2 * kv} × {D}",
            (Part(tuple((shape, scheme.mixer) for shape in attention), full),),
            "attention projections",
        ),
        matrices("attention out-projection", [(D, heads)], scheme.mixer, full, "attention projections"),
        *_mlps(config, scheme, matrices),
        Group(
            "norms, conv taps, decays, time biases",
            "vectors",
            (Part(gdn_vectors, gdn, "GDN"), Part(attention_vectors, full, "attention"), Part((((D,), BF16),), 1)),
            "small",
            rows="",
        ),
        *_ends(config, scheme, matrices, V, D),
    ]


def _mlps(config: HybridConfig, scheme: Scheme, matrices: Callable[..., Group]) -> list[Group]:
    D, E = config.hidden_size, config.num_experts
    sparse = sum(map(config.has_experts, range(config.num_hidden_layers)))

    def swiglu(label: str, F: int, count: int) -> Group:
        return matrices(label, [(F, D), (F, D), (D, F)], scheme.mlp, count, "MLP gate/up/down")

    dense = config.num_hidden_layers - sparse
    found = [swiglu("SwiGLU gate, up, down", config.intermediate_size, dense)] if dense else []
    if sparse:
        F = config.moe_intermediate_size
        experts = Part(tuple((shape, scheme.mlp) for shape in ((E, F, D), (E, F, D), (E, D, F))), sparse)
        found += [
            Group(
                f"experts, {config.num_experts_per_tok} of {E} a row",
                f"{E} × ({shapes_text([(F, D), (F, D), (D, F)])})",
                (experts,),
                "experts",
                share=config.num_experts_per_tok / E,
            ),
            swiglu("shared expert gate, up, down", config.shared_expert_intermediate_size, sparse),
            matrices("router and shared gate", [(E, D), (1, D)], scheme.router, sparse, "router"),
        ]
    return found


def _ends(config: HybridConfig, scheme: Scheme, matrices: Callable[..., Group], V: int, D: int) -> list[Group]:
    if config.tie_word_embeddings:
        return [matrices("LM head and token embedding, tied", [(V, D)], scheme.head, 1, "vocabulary head")]
    embedding = Part((((V, D), scheme.embedding),))
    return [
        matrices("LM head", [(V, D)], scheme.head, 1, "vocabulary head"),
        Group("token embedding (a gather)", f"{V} × {D}", (embedding,), "token embedding", reads=0, rows=""),
    ]


def draft_groups(draft: DraftGeometry, fmt: Format) -> list[Group]:
    """A block drafter's own tensors: it has no embedding and no head, it runs the target's.

    Codebooks, vectors and the Markov head's gathered table are bfloat16, as published.
    """
    D, V, F = draft.hidden_size, draft.vocab_size, draft.intermediate_size
    heads, kv = draft.num_attention_heads * draft.head_dim, draft.num_key_value_heads * draft.head_dim
    layers, two = draft.num_hidden_layers, draft.kind == DFLASH2
    dynamic = 2 * draft.conv_kernel_size * D // draft.conv_group_size if two else 0
    kernels = 2 * [(dynamic, D)] if two else []
    layer = [(heads, D), (kv, D), (kv, D), *kernels, (D, heads), (F, D), (F, D), (D, F)]
    base = 2 * [((2, draft.conv_kernel_size, D), BF16)] if two else []
    vectors = (((D,), BF16), ((D,), BF16), ((draft.head_dim,), BF16), ((draft.head_dim,), BF16), *base)
    name = {DFLASH2: "DFlash 2", DSPARK: "DSpark"}.get(draft.kind, "DFlash")
    shape = f"qkv {heads + 2 * kv}, {f'dynamic {dynamic}, ' if two else ''}attention {heads}, SwiGLU {F}"

    def block(label: str, shape: str, tensors: Sequence[Tensor], count: int = 1, **kind) -> Group:
        kind = {"rows": "block"} | kind
        return Group(label, shape, (Part(tuple(tensors), count),), "draft", **kind)

    found = [
        block(f"{name} draft, {layers} layers", shape, [(matrix, fmt) for matrix in layer], layers),
        block("draft context projection", f"{D} × {draft.taps * D}", [((D, draft.taps * D), fmt)], rows="verify"),
    ]
    if draft.selector_rank:
        book = (V, draft.selector_rank)
        found += [
            block("selector codebooks, bf16", f"2 × ({book[0]} × {book[1]})", [(book, BF16)], 2, rows=""),
            block("selector projection", f"{book[1]} × {D}", [((book[1], D), fmt)]),
        ]
    if draft.markov_rank:
        table = (V, draft.markov_rank)
        found += [
            block("Markov W2", f"{V} × {table[1]}", [(table, fmt)], reads=draft.max_width, rows="slots"),
            block("Markov W1, bf16 (a gather)", f"{V} × {table[1]}", [(table, BF16)], reads=0, rows=""),
            block("confidence head", f"1 × {D + table[1]}", [((1, D + table[1]), BF16), ((1,), BF16)]),
        ]
    ends = Part((((D,), BF16), ((D,), BF16)))
    found.append(Group("draft norms and kernels", "vectors", (Part(vectors, layers), ends), "draft", rows=""))
    return found


def shapes_text(shapes: Sequence[tuple[int, int]]) -> str:
    """Like "2 × (17408 × 5120), 5120 × 17408"."""
    texts = []
    for shape in dict.fromkeys(shapes):
        one, n = f"{shape[0]} × {shape[1]}", shapes.count(shape)
        texts.append(one if n == 1 else f"{n} × ({one})")
    return ", ".join(texts)
