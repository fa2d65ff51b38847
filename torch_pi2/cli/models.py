"""Loads the arguments of verbs: models, tokenizers, statistics and predictors."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_pi2.base.package import needed
from torch_pi2.base.progress import phase
from torch_pi2.base.reading import parse, read_bytes
from torch_pi2.cli import common
from torch_pi2.cli.processes import coordinated
from torch_pi2.errors import ArtifactError, ConfigError, Pi2Error
from torch_pi2.types.config import Config, check_registered

if TYPE_CHECKING:
    from torch import nn

    from torch_pi2.predict.file import FittedPredictors
    from torch_pi2.types.stats import ActivationStats

#: ``--gpu-memory all``: the whole model on the GPU.
_ALL = "all"
#: By verb: the options that reduce memory for other things than neurons.
_LESS = {"generate": "--max-new-tokens or --num-return-sequences", "chat": "--max-tokens"}
_LESS |= {"serve": "--max-tokens or --max-batch-size", "eval": "--window or --batch-size"}


@contextmanager
def _loading(args: argparse.Namespace, part: str, expected: str) -> Iterator[None]:
    """Turn errors of transformers (wrong names, broken files, missing consent) into a Pi2Error."""
    with needed("transformers", "hf"):
        from transformers.utils import logging
    from torch_pi2.decode.budget import LESS
    from torch_pi2.store.trust import is_failure

    logging.disable_progress_bar()
    try:
        yield
    except Pi2Error as error:
        fix = error.fix.replace("trust_remote_code=True", "--trust-remote-code")
        fix = fix.replace(LESS, _LESS.get(getattr(args, "verb", ""), LESS))
        if fix == error.fix:
            raise
        raise type(error)(error.what, expected=error.expected, found=error.found, fix=fix) from error
    except MemoryError:
        raise
    except BaseException as error:  # transformers and tokenizers raise anything for a damaged file
        if not is_failure(error):
            raise
        found = " ".join(str(error).split()) or type(error).__name__
        if not Path(args.model).exists() and not args.allow_download:
            part, found = "model", "no such folder, and no model of that name that was fetched before"
            expected = "a folder, a GGUF file, or a model of the Hub"
        fix = "Check the folder's name and files; pass --allow-download to fetch a name from the Hub."
        if Path(args.model).is_dir():
            fix = "Copy its files again from where they were made, or correct what is named."
        if str(args.model).endswith(".pth"):
            fix = "Import it first, if it is RWKV-7's: torch-pi2 import FILE.pth --out DIR."
        if "trust_remote_code" in found:
            fix = "Read the modelling code in that folder; if you trust it, pass --trust-remote-code."
        found = found if len(found) <= 300 else found[:300] + " ..."
        raise ConfigError(f"{part} {args.model}", expected=expected, found=found, fix=fix) from error


def _of_transformers(args: argparse.Namespace) -> dict[str, bool]:
    from torch_pi2.store.trust import trusted

    trust = trusted(args.model, args.trust_remote_code)
    return {"trust_remote_code": trust, "local_files_only": not args.allow_download}


def dtype_of(args: argparse.Namespace) -> Any:
    import torch

    return None if args.dtype == "auto" else getattr(torch, args.dtype)


def load_dense(args: argparse.Namespace) -> "nn.Module":
    """The ordinary model of ``args.model``, in eval mode."""
    from torch_pi2.cli.folders import kind_of

    if kind_of(Path(args.model)) in ("store", "quantised"):
        runs = getattr(args, "dense", False)
        fix = f"{'Leave --dense out: the folder runs as it is. Or name' if runs else 'Name'} its float checkpoint."
        expected = "a folder with float weights, as optimize writes it"
        found = "one with a store or quantised weights alone"
        raise ArtifactError(f"dense model of {args.model}", expected=expected, found=found, fix=fix)
    phase(f"load {args.model}")
    if getattr(args, "mapped", False):
        import torch_pi2

        if args.dtype != "auto":
            raise common.excludes("--mapped", f"--dtype {args.dtype}", "mapped weights stay as they are")
        scratch = None if args.out is None else args.out.parent
        if scratch is not None:
            scratch.mkdir(parents=True, exist_ok=True)
        trust = args.trust_remote_code
        return torch_pi2.load_mapped(args.model, scratch=scratch, progress=not args.quiet, trust_remote_code=trust)
    with _loading(args, "model", "a Hugging Face causal language model"):
        from transformers import AutoConfig, AutoModelForCausalLM

        from torch_pi2.checkpoint.save_load import pretrained
        from torch_pi2.rewrite.skeleton import named_class, own_classes
        from torch_pi2.store.folder import read_config

        of, made_by = _of_transformers(args), AutoModelForCausalLM
        if not (Path(args.model) / "adapter_config.json").is_file():  # which names another model
            if Path(args.model).is_dir():
                own_classes(read_config(Path(args.model)))  # with clearer errors than transformers'
            made_by = named_class(AutoConfig.from_pretrained(args.model, **of)) or made_by
        return pretrained(made_by, args.model, dtype=dtype_of(args) or "auto", **of).eval()


def load_sparse(args: argparse.Namespace) -> "nn.Module":
    """The optimised model of folder ``args.model``, in eval mode."""
    import torch_pi2

    if not (Path(args.model) / "pi2").is_dir():
        what, expected = f"model {args.model}", "a folder written by `torch-pi2 optimize` (it has a folder pi2/)"
        found = "no pi2/ in it" if Path(args.model).is_dir() else "no such folder"
        raise ArtifactError(what, expected=expected, found=found, fix="Make one: torch-pi2 optimize MODEL --out DIR.")
    phase(f"load {args.model}")
    with _loading(args, "model", "a Hugging Face causal language model"):
        how: dict[str, Any] = {"activations": getattr(args, "activations", None), "dtype": dtype_of(args)}
        if getattr(args, "budget", None) is not None:
            how |= common.given(args, "budget", "context")
        options = {"reduction": "reduction", "timeout_s": "timeout"}
        group = {name: getattr(args, option, None) for name, option in options.items()}
        if group := {name: value for name, value in group.items() if value is not None}:
            how["group"] = torch_pi2.GroupConfig(**group)
        if settings := common.left_out(args):
            from torch_pi2.checkpoint.offloaded import offload_of
            from torch_pi2.store.parts import Parts

            if getattr(args, "budget", None) is None:
                lossy = ", ".join(f"{common.option_of(name)} {value:g}" for name, value in settings.items())
                raise common.needs(lossy, "--budget", "all weights in memory")
            with Parts(Path(args.model) / "pi2") as parts:
                how["offload"] = replace(offload_of(parts.plan()), **settings)
        if getattr(args, "gpu_memory", None) not in (None, _ALL):
            how["gpu_memory"] = args.gpu_memory
        model = torch_pi2.load(args.model, trust_remote_code=args.trust_remote_code, **how)
    return coordinated(args, model)


def load_any(args: argparse.Namespace, dense: bool = False) -> "nn.Module":
    """The model of ``args.model``, optimised (unless ``dense``) or plain, in eval mode; ``--gpu-memory`` applies."""
    in_memory, wanted = dense or not (Path(args.model) / "pi2").is_dir(), getattr(args, "gpu_memory", None)
    for name, value in {"budget": getattr(args, "budget", None), **common.left_out(args)}.items():
        option = f"{common.option_of(name)} {value}"
        if in_memory and value is not None:
            found = f"{'--dense' if dense else args.model}, whose weights are all in memory"
            fix = f"Leave {common.option_of(name)} out, or pack it: torch-pi2 pack {args.model} STORE."
            raise ConfigError(option, expected="a model over a store, as pack writes it", found=found, fix=fix)
    if wanted is not None:
        _check_gpu(args, wanted, in_memory)
    model = load_dense(args) if in_memory else load_sparse(args)
    if wanted == _ALL:
        import torch

        from torch_pi2.rewrite.gpu import move_whole

        move_whole(model, torch.device("cuda"))
    return model


def drafting(args: argparse.Namespace) -> dict[str, Any]:
    """``--prompt-lookup``, ``--draft-model`` and ``--draft-tokens`` as arguments of ``generate``."""
    how: dict[str, Any] = {"prompt_lookup": args.prompt_lookup, "draft_tokens": args.draft_tokens}
    if args.draft_model is None:
        return how
    own = {"model": args.draft_model, "budget": None, "gpu_memory": None, "miss_margin": 0.0, "drop_experts": 0.0}
    return how | {"assistant_model": load_any(argparse.Namespace(**vars(args) | own))}


def _check_gpu(args: argparse.Namespace, wanted: str, dense: bool) -> None:
    """Check ``--gpu-memory`` before the model is loaded."""
    import torch

    from torch_pi2.layers.gpu import check_gpu
    from torch_pi2.rewrite.gpu import checked_memory

    option = f"--gpu-memory {wanted}"
    if wanted == _ALL and getattr(args, "budget", None) is not None:
        raise common.excludes(option, f"--budget {args.budget}", "a store is not loaded as a whole")
    if wanted != _ALL and args.compile:
        raise common.excludes(option, "--compile", "work on two devices is not compiled")
    if wanted == _ALL:
        check_gpu(torch.device("cuda"))
    elif dense:
        expected = f"{_ALL} for a model that is not optimised, because its hot neurons are not known"
        fix = f"Pass --gpu-memory {_ALL}, or optimise it first: torch-pi2 optimize {args.model} --out DIR."
        raise ConfigError(option, expected=expected, found=args.model, fix=fix)
    else:
        checked_memory(wanted)


def of_store(model: "nn.Module") -> dict[str, Any] | None:
    """Reads and omissions of a model over a store, as JSON values; None: the model is in memory."""
    from torch_pi2.decode.budget import stats
    from torch_pi2.rewrite.state import store_of

    store = store_of(model)
    if store is None:
        return None
    found = stats(model)
    names = ("wanted", "hit_rate", "wait_share", "bytes_read", "left_out", "experts_left_out")
    lossy = {"lossy": store.config.lossy, **{name: getattr(store.config, name) for name in common.LEAVE_OUT}}
    return {"budget_bytes": found["budget"].total, **{n: found[n] for n in names}, **lossy, "text": str(found)}


def load_tokenizer(args: argparse.Namespace) -> Any:
    from torch_pi2.store.trust import has_tokenizer, try_out

    folder, expected = Path(args.model), "files of a Hugging Face tokenizer"
    if folder.is_dir() and not has_tokenizer(folder):
        fix = "Copy those of its model there. Of a GGUF file torch-pi2 import says why there is none."
        raise ConfigError(f"tokenizer of {folder}", expected=expected, found="none", fix=fix)
    settings, found = folder / "tokenizer_config.json", {}
    if settings.is_file():
        found = parse(read_bytes(settings), settings, unique=False)  # transformers says less about a damaged one
    from torch_pi2.base.memory import trim
    from torch_pi2.checkpoint.gguf.importing import imports_folder

    with _loading(args, "tokenizer of", expected):
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        how: dict[str, Any] = _of_transformers(args)
        made_by: Any = AutoTokenizer
        if _is_in_one_file(folder, found):  # else transformers parses it twice, the second time for its added tokens
            made_by, how = PreTrainedTokenizerFast, how | {"added_tokens_decoder": {}}
        tokenizer = made_by.from_pretrained(args.model, **how)
        try_out(tokenizer, ours=imports_folder() in folder.parents)
    trim()  # several times the size of the file, while it was parsed
    return tokenizer


def _is_in_one_file(folder: Path, settings: Any) -> bool:
    """Whether all tokens are in tokenizer.json, and a class reads it as it is: what our imports write."""
    others = ("added_tokens.json", "special_tokens_map.json")
    return (
        isinstance(settings, dict)
        and settings.get("tokenizer_class") in ("TokenizersBackend", "PreTrainedTokenizerFast")
        and not settings.keys() & {"added_tokens_decoder", "auto_map"}
        and (folder / "tokenizer.json").is_file()
        and not any((folder / name).exists() for name in others)
    )


def load_calibration(args: argparse.Namespace) -> "tuple[Config, nn.Module, Any, str]":
    """Settings, the dense model, its tokenizer, and enough calibration text for the settings."""
    config = common.config_of(args)
    if args.verb != "profile":  # whose result holds no methods
        check_registered(config)
    model, tokenizer = load_dense(args), load_tokenizer(args)
    return config, model, tokenizer, common.text_of(args, tokenizer, config.calibration_tokens)


def load_stats(folder: Path) -> "ActivationStats":
    from torch_pi2.store.parts import Parts
    from torch_pi2.types.stats import ActivationStats

    if folder.is_dir():
        with Parts(folder) as parts:
            if (stats := parts.stats()) is not None:
                return stats
    return ActivationStats.load(folder)


def load_predictors(folder: Path | None, model_hash: str | None = None) -> "FittedPredictors | None":
    """Predictors of ``folder``; raises StaleArtifactError if they were fitted to other weights than ``model_hash``."""
    from torch_pi2.predict.file import load_predictors
    from torch_pi2.store.parts import Parts

    if folder is not None and folder.is_dir():
        with Parts(folder) as parts:
            if parts.has("predictors"):
                return parts.predictors(model_hash)
    return None if folder is None else load_predictors(folder, model_hash=model_hash)
