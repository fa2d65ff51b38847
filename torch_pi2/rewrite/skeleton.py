"""A model without weights: modules, computed buffers and small parameters; large parameters are on ``meta``."""

import copy
import importlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from torch_pi2.base.package import needed
from torch_pi2.errors import ArtifactError
from torch_pi2.store.folder import HF_METHOD, read_config
from torch_pi2.store.trust import how_to_trust, trusted

#: Appears in transformers' messages about modelling code in a checkpoint.
_TRUST = "trust_remote_code"
#: Tensors of at least this size are weights, read later; smaller ones (rotary frequencies) are computed.
_LARGE = 1 << 10
#: Modules of the functions that fill new weights.
_INITIALISING = ("torch.nn.init", "transformers.initialization")


class _LargeOnMeta(TorchFunctionMode):
    """Large tensors of ``torch.empty`` on ``meta``; ``torch.device("meta")`` would lose computed buffers' values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(func, "__module__", "") in _INITIALISING:
            tensor: torch.Tensor = kwargs["tensor"] if "tensor" in kwargs else args[0]
            if tensor.is_meta:  # without values; the operators import Dynamo
                return tensor
        if func in (torch.empty, torch.rand, torch.randn) and kwargs.get("device") is None:
            size = kwargs.get("size", args[0] if len(args) == 1 and not isinstance(args[0], int) else args)
            if all(isinstance(n, int) for n in size) and math.prod(size) >= _LARGE:
                kwargs["device"] = "meta"
        return func(*args, **kwargs)


def model_config(folder: str | Path, *, trust_remote_code: bool = False) -> Any:
    """The configuration in ``folder``, for building the model. Raises as :func:`skeleton`."""
    with needed("transformers", "hf"):
        from transformers import AutoConfig
    if os.path.lexists(Path(folder) / "config.json"):
        own_classes(read_config(Path(folder)))  # which explains a damaged file better than transformers
    with _building(folder):
        trust = trusted(folder, trust_remote_code)
        found = AutoConfig.from_pretrained(folder, trust_remote_code=trust, local_files_only=True)
    said = getattr(found, "quantization_config", None)
    if isinstance(said, dict) and said.get("quant_method") == HF_METHOD:
        del found.quantization_config  # of the folder: the model may be made dense, and saved so
    return found


def own_classes(config: Mapping[str, Any]) -> None:
    """Make transformers know the model of ``config`` if it is one that only this package has."""
    if (kind := config.get("model_type")) in ("rwkv7", "smallthinker"):
        importlib.import_module(f"torch_pi2.layers.{kind}")


def named_class(config: Any) -> Any:
    """transformers' own class that ``config`` names, such as ``BertModel``. None for causal language models, remote
    code and configurations without a name: ``AutoModelForCausalLM`` builds those.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if getattr(config, "auto_map", None):
        return None
    named = getattr(config, "architectures", None)
    name = named[0] if isinstance(named, list) and named else ""
    of_type = getattr(config, "model_type", None) in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    known = of_type and name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    found = None if known or not isinstance(name, str) or not name.isidentifier() else getattr(transformers, name, None)
    return found if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel) else None


def skeleton(
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    stored: torch.dtype | None = None,
    trust_remote_code: bool = False,
    config: Any = None,
) -> nn.Module:
    """The model of the configuration in ``folder``, or of ``config`` (:func:`named_class`), in evaluation mode.
    ``dtype``: of the parameters; None: the configuration's, else ``stored`` (as in transformers), else float32. Raises
    ArtifactError: no configuration, or transformers cannot build it. LibraryMissingError: no transformers.
    """
    config = config or model_config(folder, trust_remote_code=trust_remote_code)
    trust = trusted(folder, trust_remote_code)
    from transformers import AutoModelForCausalLM, GenerationConfig

    with _building(folder):
        with _LargeOnMeta(), torch.random.fork_rng(devices=[]):
            kind = dtype or config.dtype or stored or torch.float32
            if (named := named_class(config)) is not None:
                model: Any = named._from_config(config, dtype=kind)
            else:
                model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust, dtype=kind)
        if (Path(folder) / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model.eval()


def on_meta(model: nn.Module) -> nn.Module:
    """A copy of ``model`` with all its parameters and buffers on ``meta``."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach().to("meta"), False) for p in model.parameters()}
    memo |= {id(buffer): buffer.to("meta") for buffer in model.buffers()}
    return copy.deepcopy(model, memo)


@contextmanager
def _building(folder: str | Path) -> Iterator[None]:
    """Turns what transformers raises, which is what its classes do, into an ArtifactError."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        said, there = " ".join(str(error).split())[:300].rstrip("."), os.path.isdir(folder)
        fix = "Correct its config.json, or update transformers if it is newer." if there else "Check the folder's name."
        if _TRUST in said or (there and any(Path(folder).glob("*.py"))):
            fix = how_to_trust(folder)
        found, expected = f"{type(error).__name__}: {said}", "a model that transformers can build"
        raise ArtifactError(f"loading {folder}", expected=expected, found=found, fix=fix) from error


def places(model: nn.Module) -> list[list[str]]:
    """All names of each parameter and buffer in a checkpoint of ``model``, one list per tensor."""
    kept = set(model.state_dict(keep_vars=True))
    by_tensor: dict[int, list[str]] = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        if name in kept:
            by_tensor.setdefault(id(tensor), []).append(name)
    return list(by_tensor.values())


def put(model: nn.Module, names: list[str], value: torch.Tensor) -> None:
    """Set the parameter or buffer ``names`` (all of them) to ``value``, without a copy."""
    parameter = nn.Parameter(value, requires_grad=False)
    for name in names:
        owner_name, _, local = name.rpartition(".")
        owner = model.get_submodule(owner_name)
        if local in owner._buffers:
            owner._buffers[local] = value
        else:
            owner._parameters[local] = parameter


def now(model: nn.Module, name: str) -> torch.Tensor:
    owner, _, local = name.rpartition(".")
    return getattr(model.get_submodule(owner), local)


def fill(model: nn.Module, groups: Iterable[list[str]], read: Callable, where: str | Path) -> None:
    """Set tensors to ``read(name, current tensor)``; None means that the file has no such tensor.

    The names of one tensor share a value, unless the file has several (an output layer that is no longer tied). Raises
    ArtifactError: the file ``where`` has no value for a tensor, whose initial value would be wrong.
    """
    for names in groups:
        found = {name: value for name in names if (value := read(name, now(model, name))) is not None}
        if not names:
            continue
        if not found:
            raise _without_value(model, names[0], where)
        first, *others = found
        put(model, [name for name in names if name not in others], found[first])
        for name in others:
            put(model, [name], found[name])


def _without_value(model: nn.Module, name: str, where: str | Path) -> ArtifactError:
    fix = "Name the class that was saved as architectures in config.json, or make the folder again."
    expected = f"a value for every tensor of {type(model).__name__}"
    return ArtifactError(str(where), expected=expected, found=f"none for {name}", fix=fix)


def check_filled(model: nn.Module, where: str | Path) -> None:
    """Raises ArtifactError if a tensor of ``model`` has no value, neurons in a store excepted."""
    stored = {f"{name}.neuron_rows" for name, m in model.named_modules() if not getattr(m, "in_memory", True)}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta and name not in stored:
            raise _without_value(model, name, where)
