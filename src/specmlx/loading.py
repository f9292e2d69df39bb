"""Targets, drafters and tokenizers from a path, a Hub id or the embedded demo."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from specmlx.drafters import checkpoint as drafter_checkpoint
from specmlx.drafters.block_drafter import BlockDrafter
from specmlx.drafters.config import is_language_model
from specmlx.drafters.mtp import MTP as MTPDrafter
from specmlx.drafters.mtp_checkpoint import load_mtp
from specmlx.drafters.ngram import NGram
from specmlx.drafters.pairing import is_split_mtp
from specmlx.drafters.proposal import Drafter
from specmlx.drafters.small_lm import load_small_lm
from specmlx.formats.checkpoint import read_config
from specmlx.hub import download
from specmlx.kernels.backend import on_metal
from specmlx.kernels.choice import Chooser
from specmlx.kernels.linear import choose_kernels
from specmlx.targets.adopt import as_target
from specmlx.targets.any_lm import AnyLM
from specmlx.targets.checkpoint import load_target
from specmlx.targets.hybrid import Model

DEMO = "demo"
AUTO = "auto"
MTP, NGRAM = "mtp", "ngram"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")


def load(
    path_or_hf_repo: str = DEMO,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | None = None,
    lazy: bool = False,
    return_config: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    *,
    draft_model: Any = AUTO,
    draft_window: int | None = None,
    dtype: mx.Dtype | str | None = None,
    consistent: bool = False,
):
    """Load a target and its tokenizer as mlx_lm.load does, and keep a drafter as `model.draft_model`.

    Args:
        path_or_hf_repo: a directory, a Hub id, a .gguf file beside its tokenizer, or "demo" (the embedded pair).
        draft_model: "auto" (what the target's config names, else its folder draft/, else none; nothing is downloaded
            for it), None, a path or Hub id, or a drafter.
        draft_window: how many tokens before its proposal a block drafter looks at, at most; default: the windows of its
            config.json, and 4096 for layers without one.
        dtype: "float32", "bfloat16", "float16" or an mx.Dtype; default: the files' own, float32 for the demo.
        consistent: on Metal, one kernel for every row count of a quantized layer, so that plain and speculative passes
            give a row the same bits there; elsewhere mlx does that by itself. Default: what is fastest on this chip.

    Returns (model, tokenizer), with the config third if `return_config`. Raises ValueError in one line for what is no
    language model, a drafter that does not fit, and files that are missing or corrupt.
    """
    from mlx_lm.utils import load_tokenizer

    dtype = _dtype(dtype)
    path = resolve(path_or_hf_repo, revision=revision)
    model, config = load_target(
        path,
        dtype=mx.float32 if dtype is None and path_or_hf_repo == DEMO else dtype,
        lazy=lazy,
        model_config=model_config,
        adapter_path=adapter_path,
    )
    # A GGUF file is one of a directory.
    path = path if path.is_dir() else path.parent
    if not any((path / name).is_file() for name in _TOKENIZERS):
        raise ValueError(f"{path} has no tokenizer ({', '.join(_TOKENIZERS)}): the download may be incomplete")
    tokenizer_config = {"trust_remote_code": trust_remote_code, **(tokenizer_config or {})}
    try:
        tokenizer = load_tokenizer(path, tokenizer_config, eos_token_ids=config.get("eos_token_id"))
    except (OSError, ValueError) as error:
        raise ValueError(f"can't load the tokenizer of {path}: {' '.join(str(error).split())}") from None
    _attach(model, path, draft_model, dtype)
    _set_window(model.draft_model, draft_window)
    _choose_kernels(model, consistent)
    return (model, tokenizer, config) if return_config else (model, tokenizer)


def load_drafter(
    path_or_hf_repo: str,
    model: nn.Module,
    *,
    dtype: mx.Dtype | str | None = None,
    draft_window: int | None = None,
) -> Drafter:
    """Load a drafter and pair it with a loaded target.

    Args:
        path_or_hf_repo: a directory, a Hub id, a drafter of the demo ("demo/dflash", …), or "mtp": the head in the
            target's own files, or "ngram": prompt lookup, without weights. A directory or Hub id may be of a small
            language model with the target's tokens.
        dtype: the target's own where it is unset.
        draft_window: as in `load`.

    Raises ValueError in one line where the pair does not fit (both values
    named) or files are missing or corrupt.
    """
    model = as_target(model)
    dtype = _dtype(dtype) or model.dtype
    if path_or_hf_repo == NGRAM:
        return NGram()
    if path_or_hf_repo == MTP:
        if not isinstance(model, Model) or model.directory is None:
            raise ValueError("draft_model='mtp' needs a target that was loaded from files: this one was not")
        drafter = load_mtp(model.directory, model, dtype)
    else:
        drafter = _load_files(resolve(path_or_hf_repo), model, dtype)
    _set_window(drafter, draft_window)
    return drafter


def _load_files(path: Path, model: Model | AnyLM, dtype: mx.Dtype) -> Drafter:
    if is_language_model(config := read_config(path)) and not is_split_mtp(config):
        return load_small_lm(path, model, dtype)
    return drafter_checkpoint.load_drafter(path, model, dtype)


def resolve(path_or_hf_repo: str, revision: str | None = None, local_only: bool = False) -> Path:
    """The local directory of a path, a demo name or a Hub id, which is downloaded unless `local_only`.

    Raises ValueError in one line where there is none.
    """
    name = str(path_or_hf_repo)
    if name == DEMO or name.startswith(DEMO + "/"):
        return _demo(name)
    if (path := Path(name).expanduser()).exists():
        return path
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ValueError(f"no such directory: {name} (nor is it a Hub id like owner/name)")
    return download(name, revision, local_only)


def _demo(name: str) -> Path:
    here = Path(__file__).parent / "demo"
    known = {"demo": "target", **{f"demo/{kind}": kind for kind in ("dflash", "dflash2", "dspark", "mtp")}}
    if name not in known:
        raise ValueError(f"no demo part named {name!r}: there are {', '.join(known)}")
    return here / known[name]


def _choose_kernels(model: Model | AnyLM, consistent: bool) -> None:
    """Put the kernels that are fastest on this chip into the target's and the drafter's quantized layers."""
    if not on_metal():
        return
    chooser = Chooser(consistent=consistent)
    choose_kernels(model, model.dtype, chooser)
    if isinstance(model.draft_model, (BlockDrafter, MTPDrafter)):
        choose_kernels(model.draft_model.model, model.dtype, chooser)


def _attach(model: Model | AnyLM, path: Path, draft_model: Any, dtype: mx.Dtype | None) -> None:
    if draft_model is None:
        model.attach(None, "draft_model is None")
    elif draft_model != AUTO:
        named = isinstance(draft_model, (str, Path))
        model.attach(load_drafter(draft_model, model, dtype=dtype) if named else draft_model)
    elif model.config.draft_model:
        _attach_named(model, path, model.config.draft_model, dtype)
    elif (path / "draft").is_dir():
        model.attach(load_drafter(path / "draft", model, dtype=dtype))
    else:
        model.attach(None, f"no drafter: {path} names none and has no folder draft/")


def _attach_named(model: Model | AnyLM, path: Path, name: str, dtype: mx.Dtype | None) -> None:
    beside = path / name
    try:
        found = beside if beside.is_dir() else resolve(name, local_only=True)
    except ValueError:
        model.attach(
            None,
            f"the drafter that the config names, {name}, is not on this machine: pass draft_model={name!r}",
        )
        return
    model.attach(load_drafter(found, model, dtype=dtype))


def _set_window(drafter: Drafter | None, draft_window: int | None) -> None:
    if draft_window is None:
        return
    if not isinstance(drafter, BlockDrafter):
        what = "there is no drafter" if drafter is None else f"a {type(drafter).__name__} has no window"
        raise ValueError(f"draft_window is {draft_window} but {what}: leave it out")
    if draft_window < 1:
        raise ValueError(f"draft_window is {draft_window}: it must be at least 1")
    drafter.draft_window = draft_window


def _dtype(dtype: mx.Dtype | str | None) -> mx.Dtype | None:
    known = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
    if dtype is None or dtype in known.values():
        return dtype
    if dtype not in known:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(known)}")
    return known[dtype]
