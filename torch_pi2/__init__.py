"""torch_pi2: PowerInfer-2 for PyTorch. Feed-forward layers become predictor-gated neuron clusters.

    model = torch_pi2.optimize(model, calibration=text, tokenizer=tokenizer)

See README.md for a start, :mod:`torch_pi2.api` for the functions, :mod:`torch_pi2.errors` for what they raise.
Importing has no side effects: nothing is printed, downloaded, loaded or set.
"""

import torch_pi2.export as export
from torch_pi2.api import fit, optimize, plan, profile, restore
from torch_pi2.base.version import __version__
from torch_pi2.checkpoint import load, save
from torch_pi2.config import Config
from torch_pi2.errors import Pi2Error
from torch_pi2.graph.dispatch import NeuronClusterMode
from torch_pi2.graph.find import find_sites
from torch_pi2.plan.machine import plan_for
from torch_pi2.runtime.accesses import record_accesses
from torch_pi2.runtime.adapt import follow
from torch_pi2.runtime.budget import set_budget
from torch_pi2.runtime.generate import generate
from torch_pi2.runtime.offload import OffloadConfig, stats
from torch_pi2.runtime.trace import trace
from torch_pi2.runtime.watch import watch
from torch_pi2.store.pack import pack
from torch_pi2.store.quantize import quantize
from torch_pi2.store.synthetic import synthetic

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
