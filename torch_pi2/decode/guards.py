"""``Guards``: whether everything that decided the calls of a recorded step is still the same.

A recording has no Python left, so it is right only while the model's code would make the same calls again. Two rules
ensure that. Only known code is recorded: that of PyTorch, transformers, the standard library and this package, and of
methods of sparsity that say so (``SparseMethod.recordable``). And what this code looks up is compared between steps:
attributes of modules, configurations and methods, the functions, classes, registries and flags that its names refer to,
and the attributes of those classes.
"""

import builtins
import gc
import logging
import sys
import sysconfig
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch._C._dynamo.guards import dict_version
from torch.utils.hooks import RemovableHandle

from torch_pi2.decode.attention import NAME, USERS
from torch_pi2.predict.method import Fitted

#: Types of values that are compared; others are compared by identity.
PLAIN = {bool, int, float, complex, str, type(None), type(...)}
PLAIN |= {torch.dtype, torch.device, torch.layout, torch.memory_format}
#: Packages whose functions do the same as long as what they look up is the same.
_KNOWN = ("torch", "transformers", "torch_pi2", "huggingface_hub")
#: Attributes of every module that inference does not read.
_UNREAD = {"_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks", "_state_dict_pre_hooks"}
_UNREAD |= {"_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "_non_persistent_buffers_set"}
_UNREAD |= {"_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs"}
#: Longer lists and mappings of a module are not compared.
_COMPARED = 1000
#: Flag of classes that Python code can change (Py_TPFLAGS_HEAPTYPE).
_HEAP_TYPE = 1 << 9
_MISSING = object()


class _Memory:
    """All memory of the process as one array, of which :class:`_Watch` reads words in dictionaries that it holds."""

    __array_interface__: ClassVar = {"data": (8, True), "shape": (1 << 44,), "typestr": "<u8", "version": 3}


_MEMORY: Any = np.asarray(_Memory())


class _Watch:
    """The dictionaries and lists that a snapshot has read: whether any was written to since.

    Weights that a step reads leave no dictionary in the processor's caches. One call of numpy waits for many of them
    at once: 0.05 ms for 1,200, where a call for each takes 0.2 ms.
    """

    def __init__(self) -> None:
        self.dicts: list[dict[Any, Any]] = []
        self.lists: list[Any] = []
        self.functions: dict[FunctionType, tuple[Any, Any]] = {}
        self.begin()

    def begin(self) -> None:
        self._hooks = RemovableHandle.next_id  # of the next hook of any module
        self._versions, self._copies = list(map(dict_version, self.dicts)), [value.copy() for value in self.lists]
        # CPython 3.11: the version is the fourth word of a dictionary; code and defaults are two words of a function
        words = [id(d) // 8 + 2 for d in self.dicts] + [id(f) // 8 + 5 + i for f in self.functions for i in (0, 1)]
        values = self._versions + [0 if v is None else id(v) for pair in self.functions.values() for v in pair]
        self._words = np.array(words, dtype=np.int64)
        read = _MEMORY.take(self._words)
        self._in_words, self._read = sys.version_info < (3, 12) and read.tolist() == values, read.tobytes()

    def unwritten(self) -> bool:
        if self._hooks != RemovableHandle.next_id:
            return False
        if self._in_words:
            return _MEMORY.take(self._words).tobytes() == self._read and self._lists_same()
        return list(map(dict_version, self.dicts)) == self._versions and self.contents_same()

    def contents_same(self) -> bool:
        own = self.functions.items()
        return self._lists_same() and all(f.__code__ is code and f.__defaults__ is given for f, (code, given) in own)

    def _lists_same(self) -> bool:
        try:
            return self.lists == self._copies
        except Exception:  # values with a comparison of their own
            return False


class State:
    """A snapshot of the attributes of modules and of their configurations, for comparison with an earlier one.

    It has plain values, also in lists and mappings, and the identity of modules, tensors, functions and hooks. The
    contents of other objects are not compared. ``watch`` collects the containers and keeps them alive.
    """

    def __init__(self, model: nn.Module, watch: _Watch | None = None) -> None:
        self._alive: dict[int, Any] = {}  # weak references, as an id can be reused once its object is gone
        self._watch = watch
        modules = list(model.modules())
        self._values = [self._value(vars(module)) for module in modules]
        general = vars(nn.modules.module)
        self._values += [self._value(v) for k, v in general.items() if k.startswith("_global_forward")]
        configs = {id(c): c for c in (vars(module).get("config") for module in modules) if hasattr(c, "__dict__")}
        self._watch = None  # each step of any thread writes to configurations
        self._values += [self._value(vars(config)) for config in configs.values()]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, State) and self._values == other._values

    def _value(self, value: Any, depth: int = 0) -> Any:
        if type(value) in PLAIN:
            return type(value).__name__, repr("sdpa" if value == NAME else value)  # a step may be running elsewhere
        if isinstance(value, (dict, list, tuple, set, frozenset)) and depth < 4 and len(value) <= _COMPARED:
            if isinstance(value, dict):
                if self._watch is not None and not isinstance(value, OrderedDict):  # which hooks are in
                    self._watch.dicts.append(value)
                return [
                    (k if type(k) is str else repr(k), v if v is None or type(v) is bool else self._value(v, depth + 1))
                    for k, v in value.items()
                    if k not in _UNREAD
                ]
            if self._watch is not None and isinstance(value, (list, set)):
                self._watch.lists.append(value)
            return [self._value(v, depth + 1) for v in value]
        if isinstance(value, Fitted):
            return self._value(vars(value))
        try:
            known = weakref.ref(value)
        except TypeError:
            known = value
        self._alive[id(known)] = known
        # CUDA graphs hold addresses, and a tensor can get other memory without becoming another object
        return (id(known), value.data_ptr()) if isinstance(value, torch.Tensor) and value.is_cuda else id(known)


def _is_compared(value: Any, depth: int = 0) -> bool:
    """Whether :class:`State` compares all that there is in a method, or in its attribute ``value``."""
    if isinstance(value, Fitted):
        value = {name: held for name, held in vars(value).items() if name != "card"}
    if isinstance(value, (dict, list, tuple, set)):
        parts = list(value.values()) if isinstance(value, dict) else list(value)
        return depth < 4 and len(parts) <= _COMPARED and all(_is_compared(part, depth + 1) for part in parts)
    return type(value) in PLAIN or isinstance(value, torch.Tensor)


class _Names:
    """What the names in some code refer to: a snapshot by identity, for comparison with what they refer to now."""

    def __init__(self) -> None:
        self._entries: list[tuple[dict[Any, Any], Any, Any]] = []
        self._sizes: list[tuple[dict[Any, Any], int]] = []
        self._seen = set[Any]()
        self.watch = _Watch()

    def add(self, code: CodeType, scope: dict[str, Any]) -> None:
        """The names that ``code`` looks up in ``scope``, its module, and in other modules."""
        self._watched(scope)
        for name in code.co_names:
            if name in scope or name in vars(builtins):
                self._entry(scope, name, code.co_names)
            if isinstance(module := sys.modules.get(name), ModuleType):  # imported within the function
                self._module(module, code.co_names)

    def same(self) -> bool:
        found = (dict.get(holder, name, _MISSING) is value for holder, name, value in self._entries)
        sized = (dict.__len__(holder) == size for holder, size in self._sizes)
        return all(found) and all(sized) and self.watch.contents_same()

    def _watched(self, values: dict[str, Any]) -> None:
        if self._first(id(values)):
            self.watch.dicts.append(values)

    def _first(self, key: Any) -> bool:
        before = len(self._seen)
        self._seen.add(key)
        return len(self._seen) > before

    def _entry(self, holder: dict[str, Any], name: str, names: tuple[str, ...]) -> None:
        value = dict.get(holder, name, _MISSING)
        if self._first((id(holder), name)):
            self._entries.append((holder, name, value))
        if isinstance(value, ModuleType):
            self._module(value, names)
        elif isinstance(value, type):
            self.add_class(value)
        elif isinstance(value, FunctionType):
            self.watch.functions[value] = value.__code__, value.__defaults__
        elif value is not _MISSING and value is not USERS and type(value) not in PLAIN | {logging.Logger}:
            self._object(value)

    def _module(self, module: ModuleType, names: tuple[str, ...]) -> None:
        self._watched(vars(module))
        for name in names:
            if name in vars(module) and self._first((id(module), name, names)):
                self._entry(vars(module), name, names)

    def add_class(self, kind: type) -> None:
        """The attributes of ``kind`` and of its bases."""
        for part in kind.__mro__:
            if not part.__flags__ & _HEAP_TYPE or not self._first(part):
                continue
            (values,) = gc.get_referents(vars(part))  # the dictionary itself, which has a version
            self._all_of(values)
            self._containers(values)

    def _all_of(self, values: dict[Any, Any]) -> None:
        self.watch.dicts.append(values)
        self._sizes.append((values, dict.__len__(values)))
        self._entries += [(values, key, value) for key, value in dict.items(values)]

    def _object(self, value: Any) -> None:
        """The contents of a container, or the attributes of an object: registries are of both kinds."""
        if not self._first(id(value)) or (isinstance(value, (dict, list, set)) and len(value) > _COMPARED):
            return  # sys.modules
        if isinstance(value, dict):
            self._all_of(value)
        elif isinstance(value, (list, set)):
            self.watch.lists.append(value)
        self.add_class(type(value))
        self._containers(getattr(value, "__dict__", {}))

    def _containers(self, values: dict[str, Any]) -> None:
        for value in list(values.values()):
            if isinstance(value, (dict, list, set)):
                self._object(value)


class Guards:
    """What decided the calls of a model's recorded steps. ``any_code``: trust all code and compare only attributes of
    modules and configurations. ``unknown``: a function that is not known and was called in a recorded step, or None.
    """

    def __init__(self, any_code: bool = False) -> None:
        self.unknown: str | None = None
        self._any = any_code
        self._state: State | None = None
        self._names, self._codes = _Names(), dict[CodeType, dict[str, Any]]()
        self._watch: _Watch | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note the code that runs within the block."""
        if self._any:
            yield
            return
        ran: dict[CodeType, dict[str, Any]] = {}
        trusted = set[Any]()  # modules of methods that say so

        def called(frame: FrameType, event: str, _arg: Any) -> None:
            if event == "call" and frame.f_code not in ran:
                ran[frame.f_code] = frame.f_globals
                own = frame.f_locals.get("self")
                self._names.add_class(type(own))
                if isinstance(own, Fitted) and own.recordable and _is_compared(own):
                    trusted.add(frame.f_globals.get("__name__"))

        if sys.getprofile() is not None:  # it could not be set again: cProfile's is not made of Python
            self.unknown = "a profiler, which has to see every call"
            yield
            return
        collects = gc.isenabled()
        gc.disable()  # it calls finalizers of others in the midst of a step
        sys.setprofile(called)
        try:
            yield
        finally:
            sys.setprofile(None)
            if collects:
                gc.enable()
        for code, scope in ran.items():
            if code in self._codes:
                continue
            if not is_known(code, scope) and scope.get("__name__") not in trusted:
                self.unknown = f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"
                return
            self._codes[code] = scope
            self._names.add(code, scope)
        self._names.watch.begin()

    def renew(self, model: nn.Module) -> bool:
        """Compare with ``model`` as it is now, and take it as the new standard; True: nothing has changed."""
        before, same, self._watch, self.unknown = self._state, self._names.same(), _Watch(), None
        self._state = State(model, self._watch)
        if not same:
            self._names = _Names()
            for code, scope in self._codes.items():
                self._names.add(code, scope)
        for kind in set(map(type, model.modules())):
            self._names.add_class(kind)
            if issubclass(kind, torch.jit.ScriptModule):  # no Python calls: what it writes in place is not seen
                self.unknown = f"a {kind.__name__} of torch.jit"
        self._watch.begin()
        self._names.watch.begin()
        return same and self._state == before

    def hold(self, model: nn.Module) -> bool:
        """Whether nothing has changed, asked between two steps: a tenth of a millisecond for a model of 24 layers."""
        if self._watch is not None and self._watch.unwritten() and self._names.watch.unwritten():
            return True
        return self.renew(model)

    def rest(self) -> None:
        """Drop references to attributes of the model, which a pool of the model may own."""
        self._watch = None


@cache
def _known_folders() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Those of packages, and those of the standard library, which has folders of other packages in it."""
    packages = (folder for name in _KNOWN if name in sys.modules for folder in sys.modules[name].__path__)
    library = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
    return tuple(f"{folder}/" for folder in packages), tuple(f"{folder}/" for folder in library)


def is_known(code: CodeType, scope: dict[str, Any]) -> bool:
    file, (packages, library) = code.co_filename, _known_folders()
    if file.startswith("<"):  # generated, as the methods of dataclasses and of named tuples are, or frozen
        name = str(scope.get("__name__"))
        return file.startswith("<frozen ") or name.startswith("namedtuple_") or name.split(".")[0] in _KNOWN
    return file.startswith(packages) or (file.startswith(library) and "-packages/" not in file)
