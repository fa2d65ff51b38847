"""Predictors: which cold neurons to compute, decided before the layer runs (``predictors.safetensors``).

:data:`PREDICTORS` has every kind. To add one, write a class with these members and add it there (CONTRIBUTING.md, "Add
a predictor"):

* ``kind``: its :class:`~torch_pi2.types.method.Method`;
* ``tensor_names``, and ``per_neuron``: those of them with a row for each neuron;
* ``layer_tensors``: those that layers have, in the order in which operators take them;
* ``of_cold``: what a layer keeps of the tensors for its cold neurons (:class:`~torch_pi2.predict.cold.Cold`);
* ``read``: makes it from the tensors and JSON fields of a file, which ``tensors`` and ``fields`` write;
* ``scores``, ``threshold``, ``card``: see :class:`~torch_pi2.types.method.Predictor`.
"""

from collections.abc import Mapping
from inspect import getattr_static
from types import FunctionType
from typing import Any

import torch

from torch_pi2.errors import ConfigError
from torch_pi2.predict.lowrank import LowRank, LowRankRows
from torch_pi2.predict.method import InputMethod, SparseMethod
from torch_pi2.predict.signbit import SignBit
from torch_pi2.types.method import Fitted

#: The kinds that a file may contain.
AnyPredictor = LowRank | SignBit | SparseMethod | InputMethod
#: Method -> class.
PREDICTORS: dict[str, type[LowRank] | type[SignBit] | type[SparseMethod] | type[InputMethod]] = {
    p.kind: p for p in (LowRank, SignBit, SparseMethod, InputMethod)
}
#: Predictor tensors that layers may have, those of each kind in the order of the operators' arguments.
LAYER_TENSORS = tuple(name for p in PREDICTORS.values() for name in p.layer_tensors)
#: Those with a row for each neuron.
PER_NEURON = frozenset(name for p in PREDICTORS.values() for name in p.per_neuron)


#: Class -> its methods and properties. Kernels read the tensors, and ask none of these.
_MEMBERS = FunctionType | property | staticmethod | classmethod
_OWN = {
    kind: {name: own for name in dir(kind) if isinstance(own := getattr_static(kind, name), _MEMBERS)}
    for kind in (LowRankRows, LowRank, SignBit)
}


def check_known(key: str, predictor: Any) -> None:
    """Raises ConfigError unless ``predictor``, of site ``key``, is a SparseMethod or one of ours as it is."""
    if isinstance(predictor, Fitted):
        return
    own = next((members for kind, members in _OWN.items() if isinstance(predictor, kind)), None)
    changed = [name for name, member in (own or {}).items() if getattr_static(predictor, name, None) is not member]
    if own is None or set(changed) - {"__init__"}:
        expected = "a SparseMethod, or a LowRank, LowRankRows or SignBit as it is, of which layers read the tensors"
        found = type(predictor).__name__ + (f" with its own {', '.join(changed)}" if own else "")
        fix = "Derive a method of your own from torch_pi2.SparseMethod (docs/RESEARCH.md)."
        raise ConfigError(f"predictor of {key}", expected=expected, found=found, fix=fix)


def check_all_known(predictors: Mapping[str, Any]) -> None:
    for key, predictor in predictors.items():
        check_known(key, predictor)


def tensors_among(buffers: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """The predictor's tensors among a layer's ``buffers``, by name, in the order of the operators' arguments."""
    return {name: tensor for name in LAYER_TENSORS if (tensor := buffers[f"predictor_{name}"]) is not None}
