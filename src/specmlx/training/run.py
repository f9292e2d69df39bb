"""One training of a drafter in a folder of its own: begun, interrupted, gone on with, finished."""

import fcntl
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map

from specmlx.drafters.block_drafter import BlockDrafter
from specmlx.drafters.checkpoint import build, load_drafter
from specmlx.drafters.config import DFLASH, DFLASH2, DSPARK, DrafterConfig
from specmlx.drafters.pairing import check_pair
from specmlx.formats.atomic import write_atomically
from specmlx.formats.checkpoint import TRAINING, safetensors
from specmlx.targets.any_lm import AnyLM
from specmlx.targets.hybrid import Model
from specmlx.training.answers import Answers
from specmlx.training.batches import Batches, arrays, batched
from specmlx.training.dataset import Row
from specmlx.training.export import check_export, export
from specmlx.training.loop import CHECKPOINT, Batch, Schedule, train
from specmlx.training.losses import DraftLoss, draft_loss
from specmlx.training.settings import Settings

FOLDER, SETTINGS = TRAINING.split("/")
ANSWERS, LOCK = "answers.jsonl", "lock"
# Half cross-entropy with the target's distribution, half distance: what the demo's drafters learned best with.
LOSSES = {
    DFLASH: DraftLoss(soft=0.5, l1=0.5),
    DFLASH2: DraftLoss(soft=0.5, l1=0.5, selector=1.0),
    DSPARK: DraftLoss(soft=0.5, l1=0.5, confidence=0.1),
}
# Steps after which the number that fits into the minutes is fixed; below the warm-up, so that the rate is the same.
CALIBRATION = 20
MEASURE_EVERY = 100


class Run:
    """A drafter that learns a target's own answers to rows, in `out`/training; the finished drafter goes to `out`.

    exports: packagings that `save` writes too (see `export`), into folders export-NAME.
    Raises ValueError, before anything is written, for a folder that holds another run (or a run, without `resume`), a
    target or a drafter that can't be used, rows that can't be learned from, a disk too small for the checkpoint, and
    (with nothing changed) for a folder that another process trains in. It is kept out of others' hands as long as the
    object lives.
    """

    def __init__(
        self,
        model: Model | AnyLM,
        tokenizer: Any,
        rows: Sequence[Row],
        settings: Settings,
        out: Path,
        resume: bool = False,
        exports: Sequence[str] = (),
    ):
        self.out, self.folder = out, out / FOLDER
        self.model, self.tokenizer = model, tokenizer
        data = blake2b("".join(sorted(row.key for row in rows)).encode(), digest_size=8).hexdigest()
        self.settings = self._opened(replace(settings, data=data, target=model.fingerprint), resume)
        # The same whatever the order of the rows, and as `held_out` has it where there are enough of them.
        self.kept = [row for row in rows if row.held_out] or [min(rows, key=lambda row: row.key)]
        apart = {row.key for row in self.kept}
        self.learned = [row for row in rows if row.key not in apart]
        if not self.learned:
            raise ValueError("there is one row, and it is held out: give more rows to learn from")
        most, asked = model.config.max_position_embeddings, settings.max_length
        if most is not None and most < asked:
            raise ValueError(f"max_length is {asked}: the model has {most} positions")
        # What the chat template refuses is reported before anything is written.
        for row in () if resume else rows:
            if row.text is None:
                row.ids(tokenizer, settings.chat_template_config)
        self.drafter = self._drafter()
        self.exports = tuple(exports)
        for packaging in self.exports:
            check_export(self.drafter.config, packaging)
        check_room(out, self.parameters)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(self.folder)
        s = self.settings
        _write_json(self.folder / SETTINGS, asdict(s))
        if s.steps is None:
            # How long the steps of a calibration took that was cut short is not known: it begins again.
            for name in (CHECKPOINT, ANSWERS):
                (self.folder / name).unlink(missing_ok=True)
        self.answers = Answers(model, tokenizer, self.folder / ANSWERS, s)
        self.batches = Batches(self.answers, self.learned, s)
        self.loss = draft_loss(self.drafter, model, LOSSES[self.drafter.config.kind], s.grad_checkpoint)

    @property
    def parameters(self) -> int:
        return sum(x.size for _, x in tree_flatten(self.drafter.model.parameters()))

    def steps(self, begin: Callable[[int], None] = lambda step: None) -> Iterator[dict]:
        """Train, and yield a record every 10 steps: step, of, loss, tau, tokens_per_second, peak_memory (GB).

        Every 100 steps, and at the last, with held_out_tau. `begin` gets each step's number, from 1, before it is made.
        """
        s = self.settings
        if s.steps is None:
            clock = time.perf_counter()
            yield from self._train(CALIBRATION, begin)
            self.settings = s = replace(s, steps=self._fitting(time.perf_counter() - clock))
            _write_json(self.folder / SETTINGS, asdict(s))
        yield from self._train(s.steps, begin)

    def held_out_tau(self, most: int = 32) -> float:
        """Teacher-forced τ on rows that are not learned: 1 plus the mean count of leading slots that are right."""
        dialogues = self.answers.of(self.kept[:most])
        if not dialogues:
            return 1.0
        rng = np.random.default_rng([self.settings.seed, 4])
        batches = batched(dialogues, min(self.settings.batch_size, len(dialogues)), rng)
        found = [self.loss(self.drafter.model, *arrays(b, self.settings.anchors, rng))[1]["tau"] for b in batches]
        return mx.mean(mx.stack(found)).item()

    def save(self, card: str, verifier: str = "") -> None:
        """Write the drafter to `out` (float32 weights, config.json) with its card, and its exports, file by file.

        verifier: the target's name, for exports that name it.
        """
        weights = dict(tree_flatten(self.drafter.model.parameters()))
        write_atomically(self.out / "model.safetensors", safetensors(weights, {"format": "mlx"}))
        _write_json(self.out / "config.json", self.settings.config)
        folders = [self.out / f"export-{packaging}" for packaging in self.exports]
        for packaging, folder in zip(self.exports, folders, strict=True):
            export(self.drafter, self.model, packaging, folder, anchors=self.settings.anchors, verifier=verifier)
        for folder in (self.out, *folders):
            write_atomically(folder / "README.md", card)

    def _train(self, steps: int, begin: Callable[[int], None]) -> Iterator[dict]:
        s = self.settings

        def batch(i: int) -> Batch:
            if i % s.accumulate == 0:
                begin(i // s.accumulate + 1)
            return self.batches(i)

        def measure(step: int) -> dict[str, float]:
            due = s.steps is not None and (step % MEASURE_EVERY == 0 or step == s.steps)
            return {"held_out_tau": round(self.held_out_tau(), 5)} if due else {}

        optimizer = optim.AdamW(0.0, [0.9, 0.95], weight_decay=0.0)
        schedule = Schedule(s.learning_rate, steps, s.warmup)
        model, accumulate, every = self.drafter.model, s.accumulate, s.checkpoint_every
        for record in train(model, self.loss, batch, schedule, self.folder, optimizer, accumulate, every, measure):
            yield record | {"of": s.steps or steps, "peak_memory": round(mx.get_peak_memory() / 1e9, 3)}

    def _fitting(self, seconds: float) -> int:
        """How many steps fit into the minutes, when the first `CALIBRATION` took so many seconds, answers included."""
        s, answers = self.settings, self.answers
        row = answers.seconds / max(answers.made, 1)
        step = max(seconds - answers.seconds, 1e-9) / CALIBRATION
        # Each row is answered once, in the first epoch.
        fresh = s.batch_size * s.accumulate / s.repeats
        steps = s.minutes * 60 / (step + fresh * row)
        if steps * fresh > len(self.learned):
            steps = (s.minutes * 60 - len(self.learned) * row) / step
        return max(CALIBRATION, round(steps))

    def _opened(self, settings: Settings, resume: bool) -> Settings:
        path = self.folder / SETTINGS
        if not path.exists():
            if resume:
                raise ValueError(f"{self.out} holds no training to go on with: leave --resume out")
            # What a file manager leaves, and a writer that was killed, does not count.
            left = (path for path in self.out.rglob("*") if path.is_file() and path.suffix != ".partial")
            if any(path.name not in (".DS_Store", LOCK) for path in left):
                raise ValueError(f"{self.out} exists and is not empty: choose another --out")
            return settings
        if not resume:
            raise ValueError(f"{self.out} holds a training: --resume goes on with it, or choose another --out")
        try:
            before = Settings(**json.loads(path.read_text()))
        except (TypeError, ValueError):
            raise ValueError(f"{path} is no training of this version of specmlx: choose another --out") from None
        new, old = json.loads(json.dumps(asdict(settings))), asdict(before)
        new, old = new | new.pop("config"), old | old.pop("config")
        if settings.minutes == before.minutes is not None:
            new["steps"] = old["steps"]
        if new["data"] != old["data"]:
            raise ValueError(f"the rows of --data are not those that the training in {self.out} learns")
        if new["target"] != old["target"]:
            raise ValueError(f"the model is not the one that the training in {self.out} began with")
        for name in sorted(new.keys() | old.keys()):
            if (value := new.get(name)) != (other := old.get(name)):
                raise ValueError(f"{name} is {value!r}, but the training in {self.out} has {other!r}: it can't change")
        return before

    def _drafter(self) -> BlockDrafter:
        s = self.settings
        if reasons := check_pair(self.model.config, s.config):
            raise ValueError(f"such a drafter can't serve this target: {'; '.join(map(str, reasons))}")
        # An mlx-lm model whose layers return something else than rows is told now.
        config = DrafterConfig.from_dict(s.config)
        self.model.scored(mx.zeros((1, 2), dtype=mx.int32), config.target_layer_ids)
        begun = _begun_with(s.init, self.model) if s.init else None
        if begun and begun.config.kind == config.kind:
            return begun
        mx.random.seed(s.seed)
        drafter = build(config, self.model)
        if begun:
            # A DFlash 2 drafter is its trunk at first: convolutions begin as the identity.
            drafter.model.load_weights(tree_flatten(begun.model.parameters()), strict=False)
        mx.eval(drafter.model.parameters())
        return drafter


def check_room(out: Path, parameters: int, usage: Callable[[Path], Any] = shutil.disk_usage) -> None:
    """Raise ValueError where the disk of a folder has no room for the files of so many parameters."""
    # Weights and two moments, twice while the old file is still there; and the drafter itself.
    need = parameters * 4 * 7
    place = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if (free := usage(place).free) < need:
        raise ValueError(f"{place} has {free / 1e9:.2f} GB free: checkpoints need {need / 1e9:.2f} GB")


def _begun_with(path: str, model: Model | AnyLM) -> BlockDrafter:
    drafter = load_drafter(path, model, mx.float32)
    if not isinstance(drafter, BlockDrafter):
        raise ValueError(f"--init {path} is no DFlash, DFlash 2 or DSpark drafter: only those are trained")
    if (vocabulary := drafter.vocabulary) is not None:
        raise ValueError(f"--init {path} has a vocabulary of {vocabulary.ids.size}: only whole ones are trained")
    parameters = drafter.model.parameters()
    if not all(mx.issubdtype(x.dtype, mx.floating) for _, x in tree_flatten(parameters)):
        raise ValueError(f"--init {path} is quantized: begin with the drafter's full-precision files")
    # In the storage order that a checkpoint gives them back in, on which a product's bits may depend.
    drafter.model.update(tree_map(mx.contiguous, parameters))
    return drafter


def _locked(folder: Path) -> IO:
    """A file that keeps other processes' trainings out of a folder until it is closed, or its process ends."""
    file = (folder / LOCK).open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ValueError(f"another training runs in {folder}: wait for its end, or choose another --out") from None
    return file


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(value, indent=2) + "\n")
