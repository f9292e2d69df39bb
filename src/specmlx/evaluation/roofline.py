"""Bytes a round moves, and the tokens per second that a bandwidth and an acceptance length allow at most."""

from dataclasses import dataclass
from functools import cached_property
from math import prod

from specmlx.drafters.config import DrafterConfig
from specmlx.evaluation.chips import Chip
from specmlx.evaluation.tensors import Group, Scheme, draft_groups, target_groups
from specmlx.formats.sizes import format_named
from specmlx.targets.config import FULL, LINEAR, HybridConfig

INT8 = "int8"
# Splash, the engine of the first article, packs GDN input rows and conv inputs to these multiples.
SPLASH_ROWS, SPLASH_PAGE = 256, 16384


@dataclass(frozen=True)
class State:
    """What a lane's conversation keeps beside its keys and values: a Gated DeltaNet state a layer.

    shape: of S in all layers, `[layers, heads, Dv, Dk]` float32.
    """

    shape: tuple[int, int, int, int]
    conv_layer_bytes: int

    @property
    def recurrent_bytes(self) -> int:
        """S of all layers."""
        return 4 * prod(self.shape)

    @property
    def conv_bytes(self) -> int:
        return self.shape[0] * self.conv_layer_bytes

    @property
    def nbytes(self) -> int:
        return self.recurrent_bytes + self.conv_bytes

    @property
    def moved(self) -> int:
        """Bytes a round moves: read once, written once."""
        return 2 * self.nbytes


@dataclass(frozen=True)
class Claim:
    """What a speed implies: bytes per second, and their share of a bus."""

    tokens_per_second: float
    tau: float
    bytes_per_second: float
    bandwidth: float | None = None

    @property
    def share(self) -> float | None:
        """Of the bus, 1 being all of it."""
        return None if self.bandwidth is None else self.bytes_per_second / (self.bandwidth * 1e9)

    @property
    def impossible(self) -> bool:
        return self.share is not None and self.share > 1


@dataclass(frozen=True)
class Roofline:
    """One round of a target with a drafter or none, accounted from shapes and formats.

    Every weight counts once per round for all rows, the head once more for the drafter, gathered rows nothing, and of a
    mixture's experts as many as the rows can choose: for these alone the bytes are no floor but the most.
    Activations, logits and the rows' own keys and values are left out: they are small, and a floor stays a floor.

    Args:
        scheme: formats of the target's tensors; the drafter's matrices are in `scheme.drafter`.
        kv: "int8" (with a float32 scale per token, head, K and V), or the name of a format.
        splash: pad as Splash packs.
        width: drafted tokens verified in a round; default all of the drafter's.
    """

    config: HybridConfig
    scheme: Scheme
    draft: DrafterConfig | None = None
    kv: str = "bf16"
    lanes: int = 1
    splash: bool = False
    width: int | None = None

    @cached_property
    def target(self) -> list[Group]:
        return target_groups(self.config, self.scheme, SPLASH_ROWS if self.splash else 1)

    @cached_property
    def drafter(self) -> list[Group]:
        """The drafter's own groups."""
        return [] if self.draft is None else draft_groups(self.draft, self.scheme.drafter)

    @property
    def head(self) -> Group:
        return next(group for group in self.target if group.kind == "vocabulary head")

    @property
    def rows(self) -> int:
        """T, the rows that a verify pass runs in each lane."""
        if self.draft is None:
            return 1
        return 1 + (self.draft.max_width if self.width is None else self.width)

    @property
    def state(self) -> State:
        config, page = self.config, SPLASH_PAGE if self.splash else 1
        layers, heads = config.layer_types.count(LINEAR), config.linear_num_value_heads
        shape = layers, heads, config.linear_value_head_dim, config.linear_key_head_dim
        channels = 2 * config.linear_num_key_heads * shape[3] + heads * shape[2]
        return State(shape, -(-(config.linear_conv_kernel_dim - 1) * channels * 2 // page) * page)

    @property
    def kv_token_bytes(self) -> int:
        """Keys and values of one token, all layers."""
        D = self.config.head_dim
        row = D + 4 if self.kv == INT8 else format_named(self.kv).nbytes((D,))
        return self.config.layer_types.count(FULL) * 2 * self.config.num_key_value_heads * row

    def target_bytes(self, drafting: bool = True) -> int:
        """Weights that a pass over the target reads, with the proposal's rows or with one a lane."""
        rows = self.lanes * (self.rows if drafting else 1)
        return sum(group.read(rows) for group in self.target)

    @property
    def draft_bytes(self) -> int:
        """Weights that a proposal reads: the drafter's own, and the target's head."""
        return sum(group.read() for group in self.drafter) + self.head.nbytes if self.draft else 0

    def round_bytes(self, context: int = 0, drafting: bool = True) -> int:
        """Bytes of a round of all lanes, each with `context` tokens in its KV cache."""
        weights = self.target_bytes(drafting) + (self.draft_bytes if drafting else 0)
        return weights + self.lanes * (self.state.moved + context * self.kv_token_bytes)

    def ceiling(self, bandwidth: float, tau: float = 1.0, context: int = 0, drafting: bool = True) -> float:
        """At most so many tokens per second of all lanes together, `bandwidth` in GB/s: the byte limit."""
        return self.lanes * tau * bandwidth * 1e9 / self.round_bytes(context, drafting)

    def claim(self, tokens_per_second: float, tau: float, bandwidth: float | None = None, context: int = 0) -> Claim:
        """What a speed of all lanes together implies."""
        rounds = tokens_per_second / (self.lanes * tau)
        return Claim(tokens_per_second, tau, rounds * self.round_bytes(context), bandwidth)

    def multiply_adds(self, drafting: bool = True) -> int:
        """Multiply-adds of a round's matrices with its rows; attention, recurrence and decoding of weights left out."""
        T = self.rows if drafting else 1
        slots = T - 1
        rows = {"verify": T, "block": self.draft.block_size if self.draft else 0, "slots": 1, "": 0}
        total = round(sum(group.parameters * group.share * rows[group.rows] for group in self.target))
        if self.draft and drafting:
            total += self.head.parameters * slots
            total += sum(group.parameters * max(group.reads, 1) * rows[group.rows] for group in self.drafter)
        return self.lanes * total

    def arithmetic_limit(self, chip: Chip, tau: float = 1.0, drafting: bool = True) -> float | None:
        """At most so many tokens per second by the ALUs of a chip; None where tensor units lift that limit."""
        peak = chip.multiply_adds
        return None if peak is None else self.lanes * tau * peak / self.multiply_adds(drafting)

    def check_tau(self, tau: float) -> None:
        """Raises ValueError for tokens per pass that a round can't have."""
        if not 1 <= tau <= self.rows:
            plural = "s" if self.rows > 1 else ""
            raise ValueError(f"{tau:g} tokens per pass: a round of {self.rows} row{plural} delivers 1 to {self.rows}")
