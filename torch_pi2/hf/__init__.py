"""Folders of ours in transformers: ``from_pretrained(folder)``, ``pipeline(model=folder)``, ``transformers serve``.

    import torch_pi2.hf
    model = AutoModelForCausalLM.from_pretrained("store")

Importing this is what registers us with transformers, as a quantisation method (:mod:`torch_pi2.hf.register`), since it
asks no package by itself. ``python -m torch_pi2.hf`` is its command line with us in it.
"""

import importlib

from torch_pi2.base.extras import missing_package

try:
    importlib.import_module("transformers")
except ImportError as error:
    raise missing_package("transformers", "hf", error) from error

from torch_pi2.hf.register import register
from torch_pi2.hf.settings import Pi2QuantizationConfig

__all__ = ["Pi2QuantizationConfig"]

register()
