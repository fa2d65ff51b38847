"""transformers without what it imports for other work: compiling, sharding, detecting objects, other quantisers."""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress
from copy import copy
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from torch_pi2.base.uncompiled import uncompiled

_DYNAMO = "torch._dynamo"
#: Modules that transformers' modelling code imports names from, which take longer than all that a model needs.
_HEAVY = (
    *("accelerate", "accelerate.hooks", "accelerate.utils", "accelerate.utils.modeling"),
    *("scipy.optimize", "sklearn.metrics", "torchao.prototype.safetensors.safetensors_support"),
    *(_DYNAMO, f"{_DYNAMO}._trace_wrapped_higher_order_op", "torch.nn.attention.flex_attention"),
    *("torch.distributed._composable.fsdp", "torch.distributed.fsdp", "torch.distributed.checkpoint.hf_storage"),
    *(f"torch.distributed.tensor{part}" for part in ("", "._utils", ".placement_types")),
    *("transformers.distributed.expert_parallel", "transformers.distributed.tensor_parallel"),
)
#: The modules of transformers that import them, for any model.
_COMMON = ("modeling_utils", "generation.utils", "modeling_layers", "masking_utils", "integrations")


class _Later:
    """Stands for a class or function of a module that is imported when it is first used."""

    def __init__(self, module: str, name: str) -> None:
        self._place = module, name

    def _now(self) -> Any:
        module, name = self._place
        if isinstance(sys.modules.get(module), _LaterModule):
            del sys.modules[module]
        return getattr(importlib.import_module(module), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._now()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by inspect and copy
            raise AttributeError(name)
        return getattr(self._now(), name)

    def __instancecheck__(self, value: Any) -> bool:  # nothing is of a class that was not imported
        module = sys.modules.get(self._place[0])
        return module is not None and not isinstance(module, _LaterModule) and isinstance(value, self._now())

    def __or__(self, _other: Any) -> Any:  # in annotations
        return Any

    __ror__ = __or__


class _LaterModule(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)  # which transformers looks for

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Later(self.__name__, name)


class _BeforeDynamo:
    """A finder in ``sys.meta_path``: if Dynamo is imported after all, transformers is as if it had been all along.

    ``marked``: functions that transformers marks for Dynamo, and the names of the marks.
    """

    def __init__(self) -> None:
        self.marked: list[tuple[str, Any]] = []

    def mark(self, how: str, fn: Any) -> Any:
        self.marked.append((how, fn))
        return fn

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> Any:
        if name != _DYNAMO:
            return None
        sys.meta_path.remove(self)
        spec: Any = find_spec(name)
        spec.loader = copy(spec.loader)
        run = spec.loader.exec_module

        def exec_module(dynamo: ModuleType) -> None:
            run(dynamo)
            for how, fn in self.marked:
                getattr(dynamo, how)(fn)
            for module in [module for name, module in sys.modules.items() if name.startswith("transformers.")]:
                for name, value in [*vars(module).items()]:
                    if isinstance(value, _Later):
                        with suppress(ImportError, AttributeError):  # stays as it is
                            setattr(module, name, value._now())

        spec.loader.exec_module = exec_module
        return spec


def import_transformers() -> None:
    """Import transformers' code for language models; the names of :data:`_HEAVY` there are imported when used.

    For a process of ours. Does nothing if transformers is missing, or its modelling code was imported already.
    """
    with suppress(ImportError):  # reported by what needs it
        importlib.import_module("transformers")
    if "transformers.modeling_utils" in sys.modules or _DYNAMO in sys.modules:
        return
    before = _BeforeDynamo()
    later = {name: _LaterModule(name) for name in _HEAVY if name not in sys.modules and find_spec(name.split(".")[0])}
    marks = {how: partial(before.mark, how) for how in ("allow_in_graph", "assume_constant_result")}
    vars(later[_DYNAMO]).update(marks, disable=uncompiled)
    sys.modules.update(later)
    try:
        with suppress(Exception):  # of another version of transformers, whose modules are imported as they are
            for name in _COMMON:
                importlib.import_module(f"transformers.{name}")
    finally:
        for name, module in later.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
        sys.meta_path.insert(0, before)
