"""Predictors say which cold neurons to compute before they are computed (``predictors.safetensors``).

:data:`PREDICTORS` has every kind. To add one, write a class with the members below and a line here; files, layers and
the search for its samples read them from it (CONTRIBUTING.md, "Add a predictor"):

* ``kind``: its :class:`~torch_pi2.types.method.Method`;
* ``tensor_names``, and ``per_neuron``: those of them with a row for each neuron;
* ``layer_tensors``: those that layers have, in the order in which operators take them;
* ``of_cold``: what a layer keeps of the tensors for its cold neurons (:class:`~torch_pi2.predict.cold.Cold`);
* ``read``: makes it from the tensors and JSON fields of a file, which ``tensors`` and ``fields`` write;
* ``scores``, ``threshold``, ``card``: see :class:`~torch_pi2.types.method.Predictor`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from torch_pi2.predict.lowrank import LowRank
from torch_pi2.predict.signbit import SignBit

#: What a file of predictors may contain.
AnyPredictor = LowRank | SignBit
#: Method -> class.
PREDICTORS: dict[str, type[LowRank] | type[SignBit]] = {p.kind: p for p in (LowRank, SignBit)}
#: Tensors that layers may have of a predictor, those of each kind in the order in which operators take them.
LAYER_TENSORS = tuple(name for p in PREDICTORS.values() for name in p.layer_tensors)
#: Those that have a row for each neuron.
PER_NEURON = frozenset(name for p in PREDICTORS.values() for name in p.per_neuron)


def tensors_among(buffers: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """The predictor's tensors among a layer's ``buffers``, by name, in the order in which operators take them."""
    return {name: tensor for name in LAYER_TENSORS if (tensor := buffers[f"predictor_{name}"]) is not None}
