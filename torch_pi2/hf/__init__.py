"""Our folders in transformers: ``from_pretrained(folder)``, ``pipeline(model=folder)``, ``transformers serve``.

    import torch_pi2.hf
    model = AutoModelForCausalLM.from_pretrained("store")

Importing this module registers a quantisation method (:mod:`torch_pi2.hf.quantizer`), RWKV-7 and SmallThinker, since
transformers has no plug-in discovery. ``python -m torch_pi2.hf`` runs the transformers command line with it.
"""

import importlib

from torch_pi2.base.package import needed

with needed("transformers", "hf"):
    importlib.import_module("torch_pi2.layers.rwkv7")
    importlib.import_module("torch_pi2.layers.smallthinker")

from torch_pi2.hf.quantizer import Pi2QuantizationConfig, register

__all__ = ["Pi2QuantizationConfig"]

register()
