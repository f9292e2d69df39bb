"""Which drafters were published for which targets, with their acceptance length where a source states one."""

from dataclasses import dataclass

DFLASH, DFLASH2, DSPARK, MTP = "DFlash", "DFlash 2", "DSpark", "MTP"


@dataclass(frozen=True)
class Published:
    """A drafter for a target.

    Args:
        id: Hub id; "mtp" for the head in the target's own repository.
        taps: layers of the target whose outputs it reads (0-based).
        block: rows that it runs; a DFlash drafter proposes one less, a DSpark one as many.
        tau: acceptance length as published; None where no source was read.
        source: of that figure, and what it is of.
    """

    id: str
    kind: str
    taps: tuple[int, ...] = ()
    block: int | None = None
    tau: float | None = None
    source: str = ""


@dataclass(frozen=True)
class KnownTarget:
    """A target by all the Hub ids under which the same model goes, the publisher's first."""

    ids: tuple[str, ...]
    drafters: tuple[Published, ...]

    @property
    def billions(self) -> float | None:
        """Parameters, from the name."""
        return billions(self.ids[0])


def billions(name: str) -> float | None:
    """Billions of parameters that a name like Qwen3.8-27B states; None where it states none."""
    for part in name.rpartition("/")[2].replace("_", "-").split("-"):
        if part[-1:] in "bB" and part[:-1].replace(".", "", 1).isdigit():
            return float(part[:-1])
    return None


_PAPER = "DSpark paper (arXiv 2607.05147) table 1: GSM8K, T = 1, 7 proposals"
_MLX_DSPARK = "mlx-dspark: M4 Pro, greedy, 3 prompts, 7 proposals at most"
KNOWN = (
    KnownTarget(
        ("Qwen/Qwen3.8-27B", "nvidia/Qwen3.8-27B-NVFP4", "mlx-community/Qwen3.8-27B-4bit"),
        (
            Published(
                "incoai/Qwen3.8-27B-DFlash2",
                DFLASH2,
                (5, 19, 33, 47, 61),
                8,
                4.80,
                "Inco's article: mean of its tasks, block 8",
            ),
            Published("z-lab/Qwen3.8-27B-DFlash2", DFLASH2, (5, 19, 33, 47, 61), 8),
            Published(
                "RadixArk/Qwen3.8-27B-DSpark",
                DSPARK,
                (5, 19, 33, 47, 61),
                7,
                3.35,
                "its card: LiveCodeBench, T = 1, thinking (MBPP 4.06)",
            ),
            Published("RedHatAI/Qwen3.8-27B-speculator.dspark", DSPARK, block=8, tau=4.83, source=_MLX_DSPARK),
            Published(
                "mtp", MTP, tau=2.81, source="llama.cpp PR 27342: H200, T = 1, 7 proposals (DFlash 2 there: 3.58)"
            ),
        ),
    ),
    KnownTarget(
        ("Qwen/Qwen3.6-27B",),
        (
            Published("z-lab/Qwen3.6-27B-DFlash", DFLASH, (1, 16, 31, 46, 61), 16),
            Published("satgeze/Qwen3.6-27B-DSpark", DSPARK, block=15),
            Published("mtp", MTP),
        ),
    ),
    KnownTarget(
        ("Qwen/Qwen3.6-35B-A3B",),
        (
            Published("z-lab/Qwen3.6-35B-A3B-DFlash", DFLASH),
            Published("RedHatAI/Qwen3.6-35B-A3B-speculator.dspark", DSPARK, block=8),
            Published(
                "Koopah/Qwen3.6-35B-A3B-NVFP4-DSPARK",
                DSPARK,
                tau=4.72,
                source="mlx-dspark: M4 Pro, 4-bit target, greedy, cut by confidence",
            ),
            Published("mtp", MTP),
        ),
    ),
    KnownTarget(
        ("Qwen/Qwen3.5-27B",), (Published("z-lab/Qwen3.5-27B-DFlash", DFLASH, block=16), Published("mtp", MTP))
    ),
    KnownTarget(("Qwen/Qwen3.5-9B",), (Published("z-lab/Qwen3.5-9B-DFlash", DFLASH), Published("mtp", MTP))),
    KnownTarget(
        ("Qwen/Qwen3.5-4B",),
        (Published("z-lab/Qwen3.5-4B-DFlash", DFLASH, (1, 8, 15, 22, 29), 16), Published("mtp", MTP)),
    ),
    KnownTarget(
        ("Qwen/Qwen3.5-2B",),
        (
            Published(
                "rasyosef/Qwen3.5-2B-DFlash2",
                DFLASH2,
                block=8,
                tau=3.49,
                source="its card: mean, T = 0 (math 5.07)",
            ),
            Published("mtp", MTP),
        ),
    ),
    KnownTarget(
        ("Qwen/Qwen3-4B",),
        (
            Published("deepseek-ai/dspark_qwen3_4b_block7", DSPARK, (1, 9, 17, 25, 33), 7, 6.11, _PAPER),
            Published("RedHatAI/Qwen3-4B-speculator.dflash2", DFLASH2, block=8, tau=6.09, source="AQ-MedAI: GSM8K"),
        ),
    ),
    KnownTarget(
        ("Qwen/Qwen3-8B",),
        (
            Published("deepseek-ai/dspark_qwen3_8b_block7", DSPARK, (1, 9, 17, 25, 33), 7, 6.17, _PAPER),
            Published("RedHatAI/Qwen3-8B-speculator.dflash2", DFLASH2, block=8),
            Published("RedHatAI/Qwen3-8B-speculator.dflash", DFLASH, block=8, tau=3.74, source="its card: math"),
        ),
    ),
    KnownTarget(
        ("google/gemma-4-12B-it",),
        (
            Published("deepseek-ai/dspark_gemma4_12b_block7", DSPARK, (5, 17, 29, 41, 46), 7, 6.05, _PAPER),
            Published("z-lab/gemma4-12B-it-DFlash", DFLASH),
        ),
    ),
    KnownTarget(
        ("LiquidAI/LFM2.5-1.2B-Instruct", "LiquidAI/LFM2.5-1.2B-Instruct-MLX-bf16"),
        (Published("LiquidAI/LFM2.5-1.2B-Instruct-DSpark", DSPARK, block=9, tau=5.28, source=_MLX_DSPARK),),
    ),
    KnownTarget(
        ("LiquidAI/LFM2.5-2.6B", "LiquidAI/LFM2.5-2.6B-MLX-bf16"),
        (Published("LiquidAI/LFM2.5-2.6B-DSpark", DSPARK, block=9, tau=4.00, source=_MLX_DSPARK),),
    ),
    KnownTarget(
        ("openbmb/MiniCPM5-2B", "mlx-community/MiniCPM5-2B-bf16"),
        (Published("openbmb/MiniCPM5-2B-DSpark", DSPARK, block=7, tau=4.87, source=_MLX_DSPARK),),
    ),
    KnownTarget(
        ("Qwen/Qwen3-14B",),
        (Published("deepseek-ai/dspark_qwen3_14b_block7", DSPARK, block=7, tau=6.21, source=_PAPER),),
    ),
)


def known_target(names: list[str]) -> KnownTarget | None:
    """The known target that goes by one of these Hub ids."""
    wanted = {name.lower() for name in names}
    return next((target for target in KNOWN if wanted & {name.lower() for name in target.ids}), None)
