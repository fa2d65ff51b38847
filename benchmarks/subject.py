"""The models that benchmarks run, with labels taken from the model itself, not from the options."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from torch_pi2.checkpoint.sparse import weights_of
from torch_pi2.decode.budget import divide_budget
from torch_pi2.errors import ConfigError
from torch_pi2.rewrite.skeleton import model_config
from torch_pi2.store.folder import PI2_FOLDER
from torch_pi2.store.parts import Parts
from torch_pi2.store.storefile import STORE_FILE, StoreReader
from torch_pi2.store.synthetic import SHAPES
from torch_pi2.types.offload import Budget, OffloadConfig

#: Where folders are made and kept for the next time.
WORK = Path("work") / "bench"
#: The C++ runner, as `make runner` builds it.
RUNNER = Path("build/runner/pi2/pi2_runner")
#: Shapes where the share of neurons that fire is not 10 %: 15 % of each expert's in TurboSparse-Mixtral; 25 % in
#: SmallThinker, whose gates are all computed and whose experts are used evenly; all neurons of SwiGLU experts. 9.3 % of
#: Nemotron 3 Nano's, 12 % of RWKV-7's, 20 % of BitNet's (docs/MODELS.md has the sources); of AFM, Jais-2, Nemotron-H
#: none is published.
FIRING: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": {"active": 0.15},
    "mixtral-8x7b-quarter": {"active": 0.15},
    "smallthinker-4b": {"active": 0.25, "predictor": None, "locality": 0.0},
    "bitnet-2b": {"active": 0.2, "predictor": None},
    "rwkv7-7b": {"active": 0.12},
    "nemotron-nano-30b": {"active": 0.093, "locality": 0.0},
    **{name: {"active": 1.0, "predictor": None, "locality": 0.0} for name in ("qwen3-30b-a3b", "gpt-oss-20b")},
}


@dataclass(frozen=True)
class Subject:
    """A model folder, described.

    Attributes:
        shape: name of a synthetic model's shape (with its number of layers if that differs from the shape's);
            otherwise class and sizes.
        stem: a prefix for names of files.
        weights: ``float``, ``int4`` or ``int8``.
        synthetic: the label of a synthetic model (see :func:`torch_pi2.synthetic`), False for a real one.
    """

    shape: str
    stem: str
    weights: str
    synthetic: dict[str, Any] | Literal[False]

    @staticmethod
    def of(model: nn.Module, folder: Path) -> Subject:
        """Describe the Hugging Face ``model`` that was loaded from ``folder``."""
        config: Any = model.config
        label: dict[str, Any] = getattr(config, "torch_pi2_synthetic", None) or {}
        known = label.get("shape")
        if not isinstance(known, str):  # a real model, or a synthetic one of sizes without a name
            return Subject(_sizes(model), folder.resolve().name, weights_of(model), label or False)
        shape, stem, layers = known, known, config.num_hidden_layers
        if layers != SHAPES.get(known, {}).get("num_hidden_layers", layers):
            shape, stem = f"{known} with {layers} layers", f"{known}-{layers}-layers"
        return Subject(shape, stem, weights_of(model), label)

    def label(self) -> dict[str, Any]:
        """For results."""
        return {"shape": self.shape, "weights": self.weights, "synthetic": self.synthetic}


def _sizes(model: nn.Module) -> str:
    """E.g. ``LlamaForCausalLM, 4 layers of 256 x 1024``; the class alone if the configuration does not say."""
    config: Any = model.config
    layers, *widths = (
        getattr(config, name, None) for name in ("num_hidden_layers", "hidden_size", "intermediate_size")
    )
    name, size = type(model).__name__, " x ".join(str(width) for width in widths if width)
    return f"{name}, {layers} layers of {size}" if layers and size else name


def synthetic_folder(shape: str, weights: str, seed: int, **settings: Any) -> Path:
    """A synthetic model with random weights in ``WORK``, made if it is not there; ``settings``: others than usual."""
    import torch_pi2

    firing = {"active": 0.1} | FIRING.get(shape, {}) | settings
    exact = "-exact" if "predictor" in settings and settings["predictor"] is None else ""
    made = WORK / f"{shape}-{weights}-{firing['active']:g}{exact}"
    if not (made / PI2_FOLDER).is_dir():
        torch_pi2.synthetic(made, shape, weights=weights, seed=seed, **firing)
    return made


def check_runner() -> None:
    """Raises ConfigError: the C++ runner was not built."""
    if not RUNNER.is_file():
        raise ConfigError("the C++ runner", expected=str(RUNNER), found="no runner", fix="make runner.")


def synthetic_store(shape: str, seed: int) -> Path:
    """A store of random int4 weights in ``WORK``, made if it is not there."""
    import torch_pi2

    made = WORK / f"{shape}-store"
    if not (made / PI2_FOLDER / STORE_FILE).is_file():
        torch_pi2.pack(synthetic_folder(shape, "int4", seed), made)
    return made


class Rooms:
    """The budgets that a store can have.

    Attributes:
        hf: the model's configuration. ffn: bytes of all neurons, with gates that lie apart. token: of the neurons that
            an average token needs.
    """

    def __init__(self, folder: Path, context: int, *, trust_remote_code: bool = False) -> None:
        self._folder, self._context = folder, context
        with Parts(folder / PI2_FOLDER) as parts:
            self._plan = parts.plan()
            self._predictors = parts.predictors(self._plan.model_hash)
        self.hf = model_config(folder, trust_remote_code=trust_remote_code)
        whole = self._divided(OffloadConfig())
        self.ffn, self.token = whole.neurons + whole.gates, whole.token

    def budget(self, config: OffloadConfig, share: float) -> int:
        """Bytes for all that must stay in memory and ``share`` of the neurons, with gates that lie apart."""
        whole = self._divided(config)
        slots = math.floor(share * (whole.neurons // whole.slot)) * whole.slot
        return whole.smallest - math.ceil((1 - share) * whole.gates) + whole.in_slots(slots)

    def _divided(self, config: OffloadConfig) -> Budget:
        """All of the model, by part."""
        with StoreReader(self._folder / PI2_FOLDER / STORE_FILE) as reader:
            dtype = self.hf.dtype or reader.float_dtype or torch.float32
            how: dict[str, Any] = {"config": config, "context": self._context, "dtype": dtype}
            return divide_budget(1 << 60, reader, self._plan, self._predictors, self.hf, **how)
