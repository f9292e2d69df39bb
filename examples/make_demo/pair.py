"""How the embedded pair was made: `python examples/make_demo all --work DIR` repeats it, resumably."""

import json
import math
from collections.abc import Iterable
from pathlib import Path

import click
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten

import specmlx.demo
from make_demo.chats import VOCABULARY, PackedChats, tokenizer_texts
from make_demo.loss import next_token_loss
from make_demo.templates import held_out_examples, training_examples
from make_demo.tokenizer import train_tokenizer
from specmlx.demo.tasks import KINDS, QUESTIONS_FILE
from specmlx.drafters.block_drafter import BlockDrafter
from specmlx.drafters.config import DFLASH2
from specmlx.drafters.mtp import MTP, MTPHead
from specmlx.drafters.settings import FREQUENCIES
from specmlx.loading.load import load
from specmlx.targets.checkpoint import load_target
from specmlx.targets.config import HybridConfig
from specmlx.targets.hybrid import Model
from specmlx.training.dataset import Row
from specmlx.training.loop import Schedule, train
from specmlx.training.losses import DraftLoss, LossFunction, mtp_loss, sample_anchors
from specmlx.training.run import TRAINING, Run, Settings

HERE = Path(specmlx.demo.__file__).parent
SEED = 20261130
TARGET_STEPS = 4400
# The order of months and of letters is in few questions: at the end they come more often. Kinds and steps of each turn.
REVISIONS = (
    ((*KINDS, *5 * ("calendar", "letters")), 500),
    ((*KINDS, *9 * ("calendar",), *5 * ("letters",), *2 * ("sum",)), 700),
)
DRAFTER_STEPS = {"dflash": 1900, "dflash2": 500, "dspark": 1900, "mtp": 1000}
MTP_FIRST_STEPS = 600
# What the drafters learn the target's own answers to, and what is measured.
QUESTIONS, HELD_OUT_PER_KIND = 8000, 45
BATCH, LENGTH = 8, 256
DRAFTER_LENGTH, ANCHORS = 128, 24
# Until which step, row length, kinds. To copy a name is learned from one kind in a minute, from all not in an hour.
LESSONS = (
    (400, 64, ("greeting",)),
    (1200, 64, ("greeting", "calendar", "sum", "repeat", "bullets", "numbered", "html")),
    (3800, 128, KINDS),
    (None, LENGTH, KINDS),
)

TARGET_CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "eos_token_id": [2, 0],
    "draft_model": "demo/dspark",
}

_DRAFTER = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "num_target_layers": 8,
}
_TAPS = {"target_layer_ids": [1, 3, 6], "mask_token_id": 3}
DRAFTER_CONFIGS = {
    "dflash": {
        **_DRAFTER,
        "architectures": ["DFlashDraftModel"],
        "block_size": 8,
        "dflash_config": _TAPS,
    },
    "dflash2": {
        **_DRAFTER,
        "architectures": ["DFlash2DraftModel"],
        "block_size": 8,
        "is_causal": False,
        "dflash_config": {
            **_TAPS,
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": 32,
            "selector_top_k": 16,
        },
    },
    "dspark": {
        **_DRAFTER,
        **_TAPS,
        "architectures": ["Qwen3DSparkModel"],
        "block_size": 8,
        "markov_rank": 32,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
}
MTP_CONFIG = {
    "architectures": ["Qwen3_5MTP"],
    "model_type": "qwen3_5_mtp",
    "mtp_norms": "w",
    "text_config": TARGET_CONFIG,
}


def new_target() -> Model:
    """The demo target's geometry with seeded random weights."""
    mx.random.seed(SEED)
    model = Model(HybridConfig.from_dict(TARGET_CONFIG))
    for layer in model.layers:
        outputs = [layer.mlp.down_proj]
        if layer.is_linear:
            # Time steps log-uniform in 1e-3..1e-1 (as in Mamba 2 and Gated DeltaNet): memories of a few rows to a
            # thousand. With mlx-lm's initial values every layer forgets within three rows what it should copy.
            mixer = layer.linear_attn
            dt = mx.exp(mx.random.uniform(low=math.log(1e-3), high=math.log(1e-1), shape=(mixer.num_v_heads,)))
            mixer.dt_bias = dt + mx.log(-mx.expm1(-dt))
            outputs.append(mixer.out_proj)
        else:
            outputs.append(layer.self_attn.o_proj)
        for projection in outputs:
            # As in GPT-2: small at first, so that the residual stream still shows which token stands where.
            projection.weight = projection.weight * (2 * len(model.layers)) ** -0.5
    mx.eval(model.parameters())
    return model


def train_target(tokenizer: Path, work: Path, steps: int) -> Model:
    """Train the target on packed chats of a tokenizer, checkpointing in `work`."""
    model = new_target()
    model.train()
    lessons = [(until, PackedChats(tokenizer, SEED, BATCH, length, kinds)) for until, length, kinds in LESSONS]

    def batch(step: int) -> tuple[mx.array, ...]:
        return _arrays(next(chats for until, chats in lessons if until is None or step < until), step)

    # At 3e-3 the formats are learned as fast, but never to copy a word from the question.
    for record in train(model, next_token_loss, batch, Schedule(1e-3, steps, constant=0.6), work / "target"):
        if record["step"] % 50 == 0:
            click.echo(json.dumps(record), err=True)
    for turn in range(len(REVISIONS)):
        revise(model, tokenizer, work, turn)
    model.eval()
    return model


def revise(model: Model, tokenizer: Path, work: Path, turn: int) -> None:
    """Train on one of `REVISIONS`, checkpointing in `work`."""
    kinds, steps = REVISIONS[turn]
    chats = PackedChats(tokenizer, SEED + 2 + turn, BATCH, 96, kinds)
    schedule = Schedule(5e-4, steps, constant=0.3)
    for record in train(model, next_token_loss, lambda step: _arrays(chats, step), schedule, work / f"revision{turn}"):
        if record["step"] % 50 == 0:
            click.echo(json.dumps(record), err=True)


def _arrays(chats: PackedChats, step: int) -> tuple[mx.array, ...]:
    tokens, weights = chats.batch(step)
    return mx.array(tokens), mx.array(weights)


def train_drafter(kind: str, out: Path, work: Path, steps: int) -> BlockDrafter:
    """Train a drafter of `kind` for the target in `out` as `specmlx train` does, in `work`/`kind`.

    It learns the target's own answers to training questions. DFlash 2 begins with the trained DFlash's trunk.
    """
    target, tokenizer = load(str(out / "target"), draft_model=None, dtype="float32")
    questions = dict.fromkeys(example.question for example in training_examples("train", QUESTIONS))
    rows = [Row(({"role": "user", "content": question},)) for question in questions]
    init = str(out / "dflash") if kind == DFLASH2 else None
    settings = Settings(DRAFTER_CONFIGS[kind], steps, init=init, learning_rate=4e-3, max_tokens=96, max_length=192)
    folder = work / kind
    run = Run(target, tokenizer, rows, settings, folder, resume=(folder / TRAINING).exists())
    for record in run.steps():
        if record["step"] % 50 == 0:
            click.echo(json.dumps(record), err=True)
    return run.drafter


def train_mtp(out: Path, work: Path, steps: int) -> MTP:
    """Train an MTP head on the target in `out` from random weights, checkpointing in `work`."""
    mx.random.seed(SEED + 1)
    target = load_target(out / "target", dtype=mx.float32)[0]
    drafter = MTP(MTPHead(target.config), target)
    loss = mtp_loss(drafter, target, DraftLoss(soft=0.5, l1=0.5))
    for name, count in zip(("mtp-first", "mtp"), (MTP_FIRST_STEPS, steps), strict=True):
        _draft_lesson(drafter.model, loss, out / "target", work / name, Schedule(4e-3, count, constant=0.2))
    return drafter


def _draft_lesson(model: nn.Module, loss: LossFunction, tokenizer: Path, directory: Path, schedule: Schedule) -> None:
    chats = PackedChats(tokenizer, SEED + schedule.steps, BATCH, DRAFTER_LENGTH)

    def batch(step: int) -> tuple[mx.array, ...]:
        tokens, weights = chats.batch(step)
        anchors = sample_anchors(weights, ANCHORS, np.random.default_rng([schedule.steps, step]))
        return mx.array(tokens), mx.array(weights), mx.array(anchors)

    optimizer = optim.AdamW(0.0, [0.9, 0.95], weight_decay=0.0)
    for record in train(model, loss, batch, schedule, directory, optimizer):
        if record["step"] % 50 == 0:
            click.echo(json.dumps(record), err=True)


def save_float16(model, config: dict, directory: Path) -> None:
    """Write config.json and model.safetensors in float16 (loaded as float32) to `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = {k: v.astype(mx.float16) for k, v in tree_flatten(model.parameters())}
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def token_frequencies(tokenizer: Path, batches: int = 200) -> list[int]:
    """All ids of a tokenizer, the most frequent in training answers first: what `--draft-vocab` takes."""
    counts = np.zeros(VOCABULARY, np.int64)
    chats = PackedChats(tokenizer, SEED, BATCH, LENGTH)
    for step in range(batches):
        tokens, weights = chats.batch(step)
        counts += np.bincount(tokens[:, 1:][weights == 1], minlength=VOCABULARY)
    return np.argsort(-counts, kind="stable").tolist()


def write_questions(path: Path) -> None:
    """Write the held-out questions of each kind and those that the drafters learn from, with their answers."""
    held_out: dict[str, list[list[str]]] = {kind: [] for kind in KINDS}
    for example in held_out_examples(HELD_OUT_PER_KIND):
        held_out[example.kind].append([example.question, example.answer])
    kinds = ",\n".join(f"{json.dumps(kind)}: [\n{_lines(questions)}\n]" for kind, questions in held_out.items())
    training = _lines([e.kind, e.question, e.answer] for e in training_examples("train", QUESTIONS))
    path.write_text(f'{{"held_out": {{\n{kinds}\n}},\n"training": [\n{training}\n]}}\n')


def _lines(rows: Iterable[list[str]]) -> str:
    return ",\n".join(map(json.dumps, rows))


@click.command()
@click.argument(
    "what", type=click.Choice(["questions", "tokenizer", "frequencies", "target", *DRAFTER_CONFIGS, "mtp", "all"])
)
@click.option("--work", type=click.Path(path_type=Path), required=True, help="Where checkpoints and logs go.")
@click.option("--steps", type=int, default=None, help="Other than the steps that the embedded pair took.")
@click.option("--out", type=click.Path(path_type=Path), default=HERE, help="Where the pair goes: target/, dflash/, …")
def main(what: str, work: Path, steps: int | None, out: Path) -> None:
    """Train the embedded demo pair from nothing, or go on where an interrupted run stopped."""
    if what in ("questions", "all"):
        write_questions(out / QUESTIONS_FILE)
    if what in ("tokenizer", "all"):
        train_tokenizer(tokenizer_texts(), VOCABULARY, out / "target")
    if what in ("frequencies", "all"):
        (out / "target" / FREQUENCIES).write_text(json.dumps(token_frequencies(out / "target")) + "\n")
    if what in ("target", "all"):
        target = train_target(out / "target", work, steps or TARGET_STEPS)
        save_float16(target, TARGET_CONFIG, out / "target")
    for kind in DRAFTER_CONFIGS:
        if what in (kind, "all"):
            drafter = train_drafter(kind, out, work, steps or DRAFTER_STEPS[kind])
            save_float16(drafter.model, DRAFTER_CONFIGS[kind], out / kind)
    if what in ("mtp", "all"):
        save_float16(train_mtp(out, work, steps or DRAFTER_STEPS["mtp"]).model, MTP_CONFIG, out / "mtp")
