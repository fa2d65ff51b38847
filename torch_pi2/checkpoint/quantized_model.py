"""A model in memory whose linear layers torchao has quantised, as what its own checkpoint would be."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_pi2.base.tensorfile import Spec
from torch_pi2.checkpoint.quantized_config import Settings
from torch_pi2.checkpoint.quantized_source import TORCHAO_CLASSES, QuantizedCheckpoint, refuse_class
from torch_pi2.errors import ConfigError, UnsupportedModelError
from torch_pi2.ops.dtypes import stands_for_another


class QuantizedModel(QuantizedCheckpoint):
    """As :class:`QuantizedCheckpoint`, of a ``model`` of Hugging Face; nothing is copied before it is asked for.

    Raises:
        UnsupportedModelError: another class of tensors, factors of inputs, or no model of Hugging Face. ConfigError:
            nothing in it is quantised.
    """

    def __init__(self, model: nn.Module) -> None:
        kind = type(model).__name__
        if not hasattr(type(model), "base_model_prefix"):  # what wraps one has its methods, too
            raise UnsupportedModelError(
                f"import of a {kind}",
                expected="a Hugging Face model, which can be built from its configuration",
                found="another module",
                fix="Pass the model itself: model._orig_mod of torch.compile's, model.merge_and_unload() of PEFT's. Of "
                "other modules take the float model, and optimise that.",
            )
        config: Any = model.config
        self.config = {}
        tensors: dict[str, torch.Tensor] = {}
        kinds: dict[str, str] = {}
        seen: set[int] = set()
        for name, tensor in model.state_dict(keep_vars=True).items():
            if id(tensor) in seen:  # tied
                continue
            seen.add(id(tensor))
            if stands_for_another(tensor):
                tensors |= _parts(name, tensor)
                kinds[name.removesuffix(".weight")] = type(tensor.detach()).__name__
            else:
                tensors[name] = tensor.detach()
        if not kinds:
            raise ConfigError(
                f"import of a {kind}",
                expected="linear layers that torchao has quantised",
                found="none",
                fix="torch_pi2.optimize(model, weights='int8') quantises them.",
            )
        self._begin(_Held(kind, tensors), str(config.model_type), Settings("torchao", 8, 0), kinds)


def _parts(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """What ``tensor`` is made of, by the names that transformers saves them under."""
    of: Any = tensor.detach()
    kind = type(of).__name__
    odd = "" if kind in TORCHAO_CLASSES and name.endswith(".weight") and of.dim() == 2 else kind
    factors = getattr(of, "act_pre_scale", None)
    odd = odd or ("factors of its inputs (act_pre_scale)" if factors is not None else "")
    odd = odd or (f"{kind} for int8 inputs" if getattr(of, "act_mapping_type", None) is not None else "")
    if odd:
        raise refuse_class(f"{name} of a model in memory", odd)
    found = {part: getattr(of, part, None) for part in ("qdata", "scale", "zero_point", "scale_and_zero")}
    base = name.removesuffix(".weight")
    return {f"{base}._weight_{part}": value for part, value in found.items() if value is not None}


class _Held:
    """As :class:`torch_pi2.store.source.Checkpoint`, of tensors in memory."""

    def __init__(self, about: str, tensors: dict[str, torch.Tensor]) -> None:
        self.folder, self._tensors = Path(about), tensors

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def close(self) -> None:
        """Nothing: the model is the caller's."""

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def spec(self, name: str) -> Spec:
        return Spec.of(self._tensors[name])

    def read(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        return self._tensors[name][slice(*rows) if rows else slice(None)].cpu().contiguous()

    def read_into(self, name: str, tensor: torch.Tensor, row: int = 0) -> None:
        tensor.copy_(self._tensors[name][row : row + len(tensor)])

    def read_bytes(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self._tensors[name].cpu().contiguous().view(-1).view(torch.uint8)[start:stop]

    def check_float(self, name: str) -> None:
        """Nothing: a model computes in floats."""
