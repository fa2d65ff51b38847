"""transformers without what it imports for other work: compiling, sharding, detecting objects, other quantisers."""

import importlib
import sys
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Unpack

_DYNAMO, _UTILS = "torch._dynamo", "transformers.utils"
#: Modules that transformers' modelling code imports names from, which take longer than all that a model needs.
_HEAVY = (
    *("accelerate", "accelerate.hooks", "accelerate.utils", "accelerate.utils.modeling"),
    *("psutil", "scipy.optimize", "sklearn.metrics", "torchao.prototype.safetensors.safetensors_support"),
    *(_DYNAMO, f"{_DYNAMO}._trace_wrapped_higher_order_op", "torch.nn.attention.flex_attention"),
    *("torch.distributed._composable.fsdp", "torch.distributed._functional_collectives", "torch.distributed.fsdp"),
    *("torch.distributed.checkpoint.hf_storage", "torch.distributed.tensor", "torch.distributed.tensor._utils"),
    *("torch.distributed.tensor.placement_types", f"{_UTILS}.chat_parsing"),
    *("transformers.distributed.expert_parallel", "transformers.distributed.tensor_parallel"),
)
#: The modules of transformers that import them, for any model.
_COMMON = ("", ".modeling_utils", ".generation.utils", ".modeling_layers", ".masking_utils", ".integrations")


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


class _Partial(ModuleType):
    """A module with some names of its own, which gets all others from its file when one is asked for."""

    def __init__(self, name: str, **own: Any) -> None:
        super().__init__(name)
        vars(self).update(own)

    def __getattr__(self, name: str) -> Any:
        path = sys.modules[self.__name__.rpartition(".")[0]].__path__
        if name.startswith("__") or (spec := PathFinder.find_spec(self.__name__, path)) is None:
            raise AttributeError(name)
        module: Any = module_from_spec(spec)
        spec.loader.exec_module(module)  # type: ignore[union-attr]
        for other in vars(module).keys() - vars(self).keys():
            setattr(self, other, getattr(module, other))
        return getattr(module, name)


class _After:
    """A finder in ``sys.meta_path`` that calls ``then`` with module ``name`` once that is imported."""

    def __init__(self, name: str, then: Callable[[Any], None]) -> None:
        self.name, self.then = name, then

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> Any:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec: Any = find_spec(name)
        spec.loader = copy(spec.loader)
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            with suppress(Exception):  # of another version
                self.then(module)

        spec.loader.exec_module = exec_module
        return spec


def _as_if_imported(marked: list[tuple[str, Any]], dynamo: Any) -> None:
    """If Dynamo is imported after all: transformers is as if it always had been. ``marked``: functions for it."""
    for how, fn in marked:
        getattr(dynamo, how)(fn)
    for module in [module for name, module in sys.modules.items() if name.startswith("transformers.")]:
        for name, value in [*vars(module).items()]:
            if isinstance(value, _Later):
                with suppress(ImportError, AttributeError):  # stays as it is
                    setattr(module, name, value._now())


def _scan_when_asked(utils: Any) -> None:
    """transformers reads the files of all model families to find its public names: let it when it lacks one."""
    scan, lazy = utils.create_import_structure_from_path, utils._LazyModule
    asked, folders = lazy.__getattr__, set[Path]()
    prefixes = {"transformers": "models", "transformers.models": None}

    def some(path: Any) -> Any:
        folder = Path(path).parent if Path(path).is_file() else Path(path)
        if folder.name != "models" or folder.parent.name != "transformers":
            return scan(path)
        folders.add(folder)
        return {"auto": scan(str(folder / "auto"))}

    def find(self: Any, name: str) -> Any:
        known = (self._class_to_module, self._modules, self._objects, dir(ModuleType))
        if folders and self.__name__ in prefixes and not any(name in names for names in known):
            place = Path(self.__path__[0], name)
            if place.is_dir() or place.with_suffix(".py").is_file():
                return importlib.import_module(f".{name}", self.__name__)
            utils.create_import_structure_from_path, folder = scan, folders.pop()
            utils.define_import_structure.cache_clear()
            modules: list[Any] = [sys.modules[name] for name in prefixes if name in sys.modules]
            for module in modules:
                structure = utils.define_import_structure(folder, prefixes[module.__name__])
                whole = lazy(module.__name__, module.__file__, structure)
                for names in ("_class_to_module", "_modules", "_object_missing_backend", "_import_structure"):
                    getattr(module, names).update(getattr(whole, names))
                module.__all__ = [*{*module.__all__, *whole.__all__}]
        return asked(self, name)

    utils.create_import_structure_from_path, lazy.__getattr__ = some, find


def _undocumented(obj: Any = None, **_texts: Any) -> Any:
    """In place of transformers' ``auto_docstring``, which parses the source of what it decorates."""
    return (lambda decorated: decorated) if obj is None else obj


def import_torch() -> None:
    """Import torch so that its operators in Python do not import Dynamo to be disabled in it. For a process of ours."""

    def then(module: Any) -> None:
        module._disable_dynamo = importlib.import_module("torch_pi2.base.uncompiled").uncompiled

    sys.meta_path.insert(0, _After("torch._compile", then))
    importlib.import_module("torch")


def import_transformers() -> None:
    """Import transformers' code for language models; the names of :data:`_HEAVY` there are imported when used. For a
    process of ours; does nothing if transformers is missing, or was imported already.
    """
    if {"transformers", _DYNAMO} & sys.modules.keys() or not find_spec("transformers"):  # reported by what needs it
        return
    import torch

    from torch_pi2.base.uncompiled import uncompiled

    torch._library.utils.get_source = lambda stacklevel: ""  # reads files to name the line of an operator
    marked: list[tuple[str, Any]] = []

    def mark(how: str, fn: Any) -> Any:
        marked.append((how, fn))
        return fn

    later = {name: _LaterModule(name) for name in _HEAVY if name not in sys.modules and find_spec(name.split(".")[0])}
    marks = {how: partial(mark, how) for how in ("allow_in_graph", "assume_constant_result")}
    vars(later[_DYNAMO]).update(marks, disable=uncompiled)
    sys.modules.update(later)
    own: dict[str, dict[str, Any]] = {f"{_UTILS}.auto_docstring": {"auto_docstring": _undocumented}}
    own["transformers.processing_utils"] = {"Unpack": Unpack}
    sys.modules.update({name: _Partial(name, **names) for name, names in own.items()})
    sys.meta_path.insert(0, _After(f"{_UTILS}.import_utils", _scan_when_asked))
    try:
        with suppress(Exception):  # of another version of transformers, whose modules are imported as they are
            for name in _COMMON:
                importlib.import_module(f"transformers{name}")
    finally:
        for name, module in later.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
        sys.meta_path.insert(0, _After(_DYNAMO, partial(_as_if_imported, marked)))
