"""Targets, drafters and tokenizers from a path, a Hub id or the embedded demo."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from specmlx import __version__
from specmlx.drafters import checkpoint as drafter_checkpoint
from specmlx.drafters.block_drafter import BlockDrafter
from specmlx.drafters.checkpoint import load_mtp
from specmlx.drafters.config import is_language_model
from specmlx.drafters.mtp import MTP as MTPDrafter
from specmlx.drafters.ngram import NGram
from specmlx.drafters.pairing import check_pair, is_split_mtp
from specmlx.drafters.proposal import Drafter
from specmlx.drafters.settings import DraftSettings
from specmlx.drafters.small_lm import load_small_lm
from specmlx.formats.checkpoint import read_config
from specmlx.formats.printable import printable
from specmlx.kernels import dispatch
from specmlx.kernels.chosen import choose_kernels as choose_layers
from specmlx.kernels.chosen import mixed, run_by_mlx
from specmlx.kernels.dispatch import Chooser, on_metal, to_stderr
from specmlx.loading.auto_drafter import choose_drafter
from specmlx.loading.hub import download_config, is_id
from specmlx.loading.resolve import AUTO, DEMO, MTP, NGRAM, check_drafter_name, resolve
from specmlx.parallel.group import agreed, several
from specmlx.targets.any_lm import AnyLM
from specmlx.targets.checkpoint import load_target
from specmlx.targets.config import check_target
from specmlx.targets.from_mlx_lm import as_target
from specmlx.targets.gguf_tokenizer import tokenizer_files
from specmlx.targets.hybrid import Model


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
    draft_quantize: str | None = None,
    draft_vocab: int | None = None,
    draft_vocab_file: str | None = None,
    draft_markov_top_k: int | None = None,
    dtype: mx.Dtype | str | None = None,
    consistent: bool = False,
    group: mx.distributed.Group | None = None,
):
    """Load a target and its tokenizer as mlx_lm.load does, and keep a drafter as `model.draft_model`.

    Args:
        path_or_hf_repo: a directory, a Hub id, a .gguf file, or "demo" (the embedded pair).
        draft_model: "auto" (what the target's config names, else its folder draft/, else one in the local Hub cache
            that was published for it or fits, else its own MTP head, else prompt lookup; nothing is downloaded), None,
            a path or Hub id, or a drafter.
        draft_window: how many tokens before its proposal a block drafter looks at, at most; default: the windows of its
            config.json, and 4096 for layers without one.
        draft_quantize, draft_vocab, draft_vocab_file, draft_markov_top_k: see `drafters.settings.DraftSettings`.
        dtype: "float32", "bfloat16", "float16" or an mx.Dtype; default: the files' own, float32 for the demo.
        consistent: on Metal, one kernel of every operator for every number of rows, so that a row has the same bits in
            plain and speculative passes; elsewhere mlx does that by itself. Default: what is fastest on this chip.
        group: `mx.distributed.init()` in each of several processes that answer together: each keeps its part of the
            hybrid and the whole drafter, and all have to make the same calls (docs/distributed.md).

    Returns (model, tokenizer), with the config third if `return_config`. Raises ValueError in one line for what is no
    language model, a drafter that does not fit, files that are missing or corrupt, and `consistent` where it can't be.
    """
    from mlx_lm.utils import load_tokenizer

    dtype = _dtype(dtype)
    settings = DraftSettings(draft_window, draft_quantize, draft_vocab, draft_vocab_file, draft_markov_top_k)
    name = str(path_or_hf_repo)
    group = several(group)
    with agreed(group, "specmlx", "model") as here:
        here["specmlx"] = __version__
        # Told by the small file before the large ones are fetched.
        if is_id(name) and (small := download_config(name, revision)) is not None:
            check_target(small, name)
        path = resolve(path_or_hf_repo, revision=revision)
        if is_id(name) and not (path / "config.json").is_file():
            raise ValueError(
                f"{name} has no config.json: of GGUF files, fetch one (hf download {name} FILE.gguf) and name its path"
            )
        own = mx.float32 if dtype is None and path_or_hf_repo == DEMO else dtype
        model, config = load_target(
            path, dtype=own, lazy=lazy, model_config=model_config, adapter_path=adapter_path, group=group
        )
        here["model"] = json.dumps(config, sort_keys=True, default=str)
        tokenizer_config = {"trust_remote_code": trust_remote_code, **(tokenizer_config or {})}
        with tokenizer_files(path) as files:
            if not tokenizer_config["trust_remote_code"]:
                _check_tokenizer_class(files)
            try:
                tokenizer = load_tokenizer(files, tokenizer_config, eos_token_ids=config.get("eos_token_id"))
                # Settings of wrong types are noticed by whoever uses them.
                starts = "x".startswith(tokenizer.bos_token or "y")
                tokenizer.decode(tokenizer.encode("x", add_special_tokens=not starts))
            # tokenizers raises a bare Exception.
            except Exception as error:
                what = " ".join(str(error).split())[:200]
                raise ValueError(f"can't load the tokenizer of {path}: {what or type(error).__name__}") from None
        _attach(model, name, path, draft_model, dtype, settings)
        choose_kernels(model, consistent)
    return (model, tokenizer, config) if return_config else (model, tokenizer)


def _check_tokenizer_class(folder: Path) -> None:
    """Raise ValueError where a folder names another class than a tokenizer's.

    transformers takes any of its classes by name; those that load others ask on stdin whether to run a folder's code.
    """
    for name in ("tokenizer_config.json", "config.json"):
        kind = read_config(folder, name).get("tokenizer_class") if (folder / name).exists() else None
        if kind is not None and not re.fullmatch(r"(?!Auto|Rag)\w*(Tokenizer|TokenizerFast|Backend)", str(kind)):
            raise ValueError(f"{folder}/{name}: tokenizer_class is {str(kind)[:40]!r}, which is no tokenizer")


def load_drafter(
    path_or_hf_repo: str,
    model: nn.Module,
    *,
    dtype: mx.Dtype | str | None = None,
    draft_window: int | None = None,
    draft_quantize: str | None = None,
    draft_vocab: int | None = None,
    draft_vocab_file: str | None = None,
    draft_markov_top_k: int | None = None,
) -> Drafter:
    """Load a drafter and pair it with a loaded target.

    Args:
        path_or_hf_repo: a directory, a Hub id, a drafter of the demo ("demo/dflash", …), or "mtp": the head in the
            target's own files, or "ngram": prompt lookup, without weights. A directory or Hub id may be of a small
            language model with the target's tokens.
        dtype: the target's own where it is unset.
        draft_window, draft_quantize, draft_vocab, draft_vocab_file, draft_markov_top_k: as in `load`.

    Raises ValueError in one line where the pair does not fit (both values named), settings can't be honoured, or files
    are missing or corrupt.
    """
    settings = DraftSettings(draft_window, draft_quantize, draft_vocab, draft_vocab_file, draft_markov_top_k)
    return _load_drafter(path_or_hf_repo, as_target(model), _dtype(dtype), settings)


def _load_drafter(
    path_or_hf_repo: str | Path, model: Model | AnyLM, dtype: mx.Dtype | None, settings: DraftSettings
) -> Drafter:
    dtype = dtype or model.dtype
    directories = [] if model.directory is None else [model.directory]
    if path_or_hf_repo == NGRAM:
        drafter = NGram()
    elif path_or_hf_repo == MTP:
        if not isinstance(model, Model) or model.source is None:
            raise ValueError("draft_model='mtp' needs a target that was loaded from files: this one was not")
        drafter = load_mtp(model.source, model, dtype)
    else:
        name = str(path_or_hf_repo)
        check_drafter_name(name)
        # Before its weights are downloaded.
        config = download_config(name) if is_id(name) else None
        if config and not is_language_model(config) and (reasons := check_pair(model.config, config)):
            raise ValueError(f"the drafter {name} can't serve this target: {'; '.join(reasons)}")
        path = resolve(path_or_hf_repo)
        directories.insert(0, path)
        config = read_config(path)
        small = is_language_model(config) and not is_split_mtp(config)
        try:
            drafter = (load_small_lm if small else drafter_checkpoint.load_drafter)(path, model, dtype)
        # Values of a config may be of any type.
        except (AttributeError, IndexError, KeyError, OverflowError, TypeError) as error:
            what = " ".join(str(error).split())[:300]
            raise ValueError(f"{path}/config.json is no drafter's: {type(error).__name__}: {what}") from None
    settings.apply(drafter, directories)
    _choose_drafter_kernels(drafter, dtype)
    return drafter


def choose_kernels(model: Model | AnyLM, consistent: bool = False) -> None:
    """Let the target's layers run the kernels that are fastest on this chip, or with `consistent` one kernel for every
    number of rows; elsewhere than on Metal nothing changes. Called again, it chooses anew.

    Raises ValueError where `consistent` can't be had.
    """
    if not on_metal():
        return
    if consistent and isinstance(model, AnyLM):
        kind = model.config.model_type
        raise ValueError(f"consistent can't be had: {kind} runs by mlx-lm's own code, whose attention goes by the rows")
    chooser = Chooser(consistent=consistent, tell=to_stderr)
    chosen = choose_layers(model, model.dtype, chooser)
    # Asked for now, not in the middle of the first answer.
    by_mlx = run_by_mlx(model, model.dtype)
    for dtype in (model.dtype, mx.float32):
        dispatch.kernel("accept", {"dtype": dtype})
    model.kernel_note = mixed(chosen, [*by_mlx, "attention"] if isinstance(model, AnyLM) else by_mlx)


def _choose_drafter_kernels(drafter: Drafter, dtype: mx.Dtype) -> None:
    """The fastest ones: a draft may round as it likes."""
    if not on_metal() or not isinstance(drafter, (BlockDrafter, MTPDrafter)):
        return
    chooser = Chooser(tell=to_stderr)
    choose_layers(drafter.model, dtype, chooser)
    if drafter.shortlist is not None:
        head = nn.Sequential(drafter.shortlist)
        choose_layers(head, dtype, chooser)
        drafter.shortlist = head.layers[0]
    dispatch.kernel("draft_head", {"dtype": dtype})


def _attach(
    model: Model | AnyLM, name: str, path: Path, draft_model: Any, dtype: mx.Dtype | None, settings: DraftSettings
) -> None:
    drafter, reason = None, None
    if draft_model is None:
        reason = "draft_model is None"
    elif draft_model == AUTO:
        choice = choose_drafter(name, path, model.config)
        try:
            drafter = choice.name and _load_drafter(choice.name, model, dtype, settings)
            reason = choice.reason
        except ValueError as error:
            if choice.named:
                raise
            # Nobody asked for this one: the target runs without it.
            reason = f"the drafter that was found, {choice.reason}, can't be used: {error}"
        if drafter is None or not choice.named:
            what = f"prompt lookup: {reason}" if drafter is None else reason
            print(printable(f"draft_model='auto' took {what}", sys.stderr), file=sys.stderr)
    elif isinstance(draft_model, (str, Path)):
        drafter = _load_drafter(draft_model, model, dtype, settings)
    elif isinstance(draft_model, Drafter):
        drafter = draft_model
        if settings != DraftSettings():
            settings.apply(drafter, [path if path.is_dir() else path.parent])
    else:
        kind = type(draft_model).__name__
        raise ValueError(f"draft_model is {draft_model!r:.40}, of the kind {kind}: give a name, a drafter or None")
    if drafter is not None:
        model.attach(drafter, None)
        return
    settings.apply(None)
    model.attach(NGram() if draft_model == AUTO else None, reason)


def _dtype(dtype: mx.Dtype | str | None) -> mx.Dtype | None:
    known = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
    found = known.get(dtype, dtype)
    if found is not None and found not in known.values():
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(known)}")
    return found
