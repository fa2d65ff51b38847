"""What code that no longer runs would look up besides its arguments, to notice when it changes.

Collected from the code without running it: names of its module, attributes of modules, classes and objects that it
mentions, contents of lists and mappings, and the same of functions that it mentions. Of PyTorch's own functions only
attributes of the module are noted.
"""

import sys
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from torch_pi2.errors import ConfigError

_MISSING, _GONE = object(), object()
#: Contents of longer lists and mappings are not compared.
_LONGEST = 256
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
#: What a look-up may make anew each time: class methods are.
_EQUAL = (*_PLAIN, types.MethodType)


class Lookups:
    """What the forwards of ``modules`` look up, and those of modules in them. A copy has none."""

    def __init__(self, modules: Iterable[nn.Module] = ()) -> None:
        self._found: dict[tuple[int, str], tuple[Any, ...]] = {}
        self._lists: list[tuple[list[Any], list[Any]]] = []
        self._seen = set[tuple[int, int]]()
        for root in modules:
            for module in root.modules():
                for holder, name in ((module, "__class__"), (type(module), "forward"), (type(module), "__call__")):
                    self._note(holder, name)
                if module is not root:
                    self._note(module, "forward")
                self._read(type(module).forward, module)
        self._notes = list(self._found.values())
        self._found, self._seen = {}, set()

    def check(self, key: str) -> None:
        """Raises ConfigError, about the layer ``key``, if something is another now."""
        if name := self.changed():
            what = f"{name}, which the code of {key} looks up"
            expected = "what it was when the model was optimised, as a sparse layer computes in place of that code"
            fix = "Set it back, or call torch_pi2.restore(model) and optimise the model as it is now."
            raise ConfigError(what, expected=expected, found="another value", fix=fix)

    def changed(self) -> str:
        """The name of something that is another now; empty: there is none."""
        for get, holder, name, value in self._notes:
            now = get(holder, name, _MISSING)
            if now is value or now is _GONE:
                continue
            if not (isinstance(value, _EQUAL) and type(now) is type(value) and now == value):
                return str(name)
        for now, before in self._lists:
            if len(now) != len(before) or any(a is not b for a, b in zip(now, before)):
                return "a list"
        return ""

    def __reduce__(self) -> Any:
        return Lookups, ()

    def _note(self, holder: Any, name: str) -> Any:
        kept: Any = holder
        get: Any = dict.get if isinstance(holder, dict) else getattr
        if isinstance(holder, nn.Module):  # it may hold the layer that holds this
            kept, get = weakref.ref(holder), _of_module
        value = get(kept, name, _MISSING)
        self._found.setdefault((id(holder), name), (get, kept, name, value))
        return value

    def _read(self, function: Any, owner: Any = None) -> None:
        """``function``, a method of ``owner``."""
        function = getattr(function, "__func__", function)
        if not isinstance(function, types.FunctionType) or (id(function), id(owner)) in self._seen:
            return
        if function.__module__ == nn.Module.__module__:  # Module.to, mentioned for a tensor's
            return
        package = str(function.__module__).partition(".")[0]
        if package in sys.stdlib_module_names:
            return
        self._seen.add((id(function), id(owner)))
        names = list(dict.fromkeys(_names(function.__code__)))
        of_torch = package == "torch"
        for name in () if of_torch else names:
            if name in function.__globals__:
                self._follow(self._note(function.__globals__, name), names)
        for cell in () if of_torch else function.__closure__ or ():
            self._follow(self._note(cell, "cell_contents"), names)
        self._follow(owner, names)

    def _follow(self, value: Any, names: list[str]) -> None:
        """What is looked up in ``value`` by ``names``."""
        if isinstance(value, _PLAIN) or value is _MISSING:
            return
        if isinstance(value, types.FunctionType | types.MethodType):
            self._read(value, getattr(value, "__self__", None))
        elif isinstance(value, torch.Tensor):
            self._note(value, "_version")
        elif isinstance(value, dict) and len(value) <= _LONGEST:
            for name in list(value) if type(value) is dict else ():
                self._note(value, name)
        elif isinstance(value, list) and len(value) <= _LONGEST:
            self._lists.append((value, value.copy()))
        else:
            self._attributes(value, names)

    def _attributes(self, value: Any, names: list[str]) -> None:
        own = getattr(value, "__dict__", {})
        for name in names:
            if name in own and (id(value), name) not in self._found and name != "training":
                self._follow(self._note(value, name), names)
            elif not isinstance(value, type | types.ModuleType) and hasattr(type(value), name):
                if getattr(type(value), name) is getattr(nn.Module, name, _MISSING):
                    continue  # every module has it: ``to`` in the code may be a tensor's
                constant = isinstance(getattr(type(value), name), _PLAIN)
                self._read(self._note(value if constant else type(value), name), value)


def _of_module(module: weakref.ref[nn.Module], name: str, default: Any) -> Any:
    if (holder := module()) is None:  # a layer that was taken out of its model
        return _GONE
    own = vars(holder)
    return own.get(name, default) if name in own or name == "forward" else getattr(holder, name, default)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
