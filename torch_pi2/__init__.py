"""torch_pi2: PowerInfer-2 for PyTorch. Feed-forward layers become predictor-gated neuron clusters.

    model = torch_pi2.optimize(model, calibration=text, tokenizer=tokenizer)

See README.md for a start, :mod:`torch_pi2.api` for the functions, :mod:`torch_pi2.errors` for what they raise.
Importing has no side effects: nothing is printed, downloaded, loaded or set, and torch is imported with the first name
that needs it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from torch_pi2.base.package import __version__ as __version__
from torch_pi2.errors import Pi2Error as Pi2Error

if TYPE_CHECKING:
    from torch_pi2.api import fit as fit
    from torch_pi2.api import optimize as optimize
    from torch_pi2.api import plan as plan
    from torch_pi2.api import profile as profile
    from torch_pi2.api import quantize_ as quantize_
    from torch_pi2.api import restore as restore
    from torch_pi2.checkpoint.gguf.importing import import_gguf as import_gguf
    from torch_pi2.checkpoint.importing import import_quantized as import_quantized
    from torch_pi2.checkpoint.pack import pack as pack
    from torch_pi2.checkpoint.quantize import quantize as quantize
    from torch_pi2.checkpoint.rwkv import import_rwkv as import_rwkv
    from torch_pi2.checkpoint.save_load import load as load
    from torch_pi2.checkpoint.save_load import load_dense as load_dense
    from torch_pi2.checkpoint.save_load import save as save
    from torch_pi2.checkpoint.stored import load_mapped as load_mapped
    from torch_pi2.checkpoint.synthetic import synthetic as synthetic
    from torch_pi2.decode.budget import set_budget as set_budget
    from torch_pi2.decode.budget import stats as stats
    from torch_pi2.decode.decoder import Decoder as Decoder
    from torch_pi2.decode.generate import generate as generate
    from torch_pi2.decode.lead import lead as lead
    from torch_pi2.decode.plan_controller import follow as follow
    from torch_pi2.decode.prefetch import prefetching as prefetching
    from torch_pi2.export.api import export as export
    from torch_pi2.export.program import export_program as export_program
    from torch_pi2.export.run import Bundle as Bundle
    from torch_pi2.fitting.custom import LayerSamples as LayerSamples
    from torch_pi2.fitting.custom import LinearSamples as LinearSamples
    from torch_pi2.graph.dispatch import NeuronClusterMode as NeuronClusterMode
    from torch_pi2.graph.dispatch import trying as trying
    from torch_pi2.graph.find import find_sites as find_sites
    from torch_pi2.hf.quantizer import Pi2QuantizationConfig as Pi2QuantizationConfig
    from torch_pi2.machine.find import find_hardware as find_hardware
    from torch_pi2.observe.accesses import record_accesses as record_accesses
    from torch_pi2.observe.policies import CachePolicy as CachePolicy
    from torch_pi2.observe.policies import register_cache_policy as register_cache_policy
    from torch_pi2.observe.record import Activations as Activations
    from torch_pi2.observe.record import record as record
    from torch_pi2.observe.trace import trace as trace
    from torch_pi2.observe.watch import watch as watch
    from torch_pi2.planner.for_machine import plan_for as plan_for
    from torch_pi2.planner.supported import supported as supported
    from torch_pi2.planner.zeros import zeros as zeros
    from torch_pi2.predict.method import InputMethod as InputMethod
    from torch_pi2.predict.method import SparseMethod as SparseMethod
    from torch_pi2.predict.method import register_method as register_method
    from torch_pi2.training.sparsify import sparsify as sparsify
    from torch_pi2.types.config import Config as Config
    from torch_pi2.types.offload import OffloadConfig as OffloadConfig
    from torch_pi2.types.shard import GroupConfig as GroupConfig
    from torch_pi2.types.site import FFNSite as FFNSite
    from torch_pi2.types.site import LinearRef as LinearRef

#: Module -> the public names that are its own; each is imported when it is first used (PEP 562).
_FROM = {
    "api": ("fit", "optimize", "plan", "profile", "quantize_", "restore"),
    "checkpoint.gguf.importing": ("import_gguf",),
    "checkpoint.importing": ("import_quantized",),
    "checkpoint.stored": ("load_mapped",),
    "checkpoint.pack": ("pack",),
    "checkpoint.quantize": ("quantize",),
    "checkpoint.rwkv": ("import_rwkv",),
    "checkpoint.save_load": ("load", "load_dense", "save"),
    "checkpoint.synthetic": ("synthetic",),
    "decode.plan_controller": ("follow",),
    "decode.budget": ("set_budget", "stats"),
    "decode.decoder": ("Decoder",),
    "decode.generate": ("generate",),
    "decode.lead": ("lead",),
    "decode.prefetch": ("prefetching",),
    "export.api": ("export",),
    "export.program": ("export_program",),
    "export.run": ("Bundle",),
    "fitting.custom": ("LayerSamples", "LinearSamples"),
    "graph.dispatch": ("NeuronClusterMode", "trying"),
    "graph.find": ("find_sites",),
    "hf.quantizer": ("Pi2QuantizationConfig",),
    "machine.find": ("find_hardware",),
    "observe.accesses": ("record_accesses",),
    "observe.policies": ("CachePolicy", "register_cache_policy"),
    "observe.record": ("Activations", "record"),
    "observe.trace": ("trace",),
    "observe.watch": ("watch",),
    "planner.for_machine": ("plan_for",),
    "predict.method": ("InputMethod", "SparseMethod", "register_method"),
    "planner.supported": ("supported",),
    "planner.zeros": ("zeros",),
    "types.config": ("Config",),
    "types.offload": ("OffloadConfig",),
    "types.shard": ("GroupConfig",),
    "types.site": ("FFNSite", "LinearRef"),
    "training.sparsify": ("sparsify",),
}
#: Names of earlier releases -> what replaces them.
_REMOVED = {"export_gguf": "run llama.cpp's convert_hf_to_gguf.py on the folder of the dense checkpoint"}
_MODULE_OF = {name: f"torch_pi2.{module}" for module, names in _FROM.items() for name in names}

__all__ = sorted([*_MODULE_OF, "Pi2Error", "__version__"])

# A package is bound to its name when it is first imported: now, so that ``torch_pi2.export`` stays the function. What
# is in the package is imported by ``from torch_pi2.export... import ...``.
importlib.import_module("torch_pi2.export")
globals().pop("export", None)


if not TYPE_CHECKING:  # who would take every name that is not there for one of any type

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            advice = f" any more: {_REMOVED[name]}" if name in _REMOVED else ""
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{advice}")
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
