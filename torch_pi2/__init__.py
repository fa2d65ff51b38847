"""torch_pi2: PowerInfer-2 for PyTorch. Feed-forward layers become predictor-gated neuron clusters.

    model = torch_pi2.optimize(model, calibration=text, tokenizer=tokenizer)

See README.md for a start, :mod:`torch_pi2.api` for the functions, :mod:`torch_pi2.errors` for what they raise.
Importing has no side effects: nothing is printed, downloaded, loaded or set.
"""

import torch_pi2.export as export
from torch_pi2.api import fit, optimize, plan, profile, restore
from torch_pi2.base.version import __version__
from torch_pi2.checkpoint.pack import pack
from torch_pi2.checkpoint.quantize import quantize
from torch_pi2.checkpoint.save_load import load, save
from torch_pi2.checkpoint.synthetic import synthetic
from torch_pi2.decode.adapt import follow
from torch_pi2.decode.budget import set_budget
from torch_pi2.decode.generate import generate
from torch_pi2.errors import Pi2Error
from torch_pi2.graph.dispatch import NeuronClusterMode
from torch_pi2.graph.find import find_sites
from torch_pi2.layers.offloaded import stats
from torch_pi2.observe.accesses import record_accesses
from torch_pi2.observe.trace import trace
from torch_pi2.observe.watch import watch
from torch_pi2.plan.machine import plan_for
from torch_pi2.spec.config import Config
from torch_pi2.spec.offload import OffloadConfig

__all__ = [
    "Config",
    "NeuronClusterMode",
    "OffloadConfig",
    "Pi2Error",
    "__version__",
    "export",
    "find_sites",
    "fit",
    "follow",
    "generate",
    "load",
    "optimize",
    "pack",
    "plan",
    "plan_for",
    "profile",
    "quantize",
    "record_accesses",
    "restore",
    "save",
    "set_budget",
    "stats",
    "synthetic",
    "trace",
    "watch",
]
