"""Parameters whose values are in a sparse layer, and the modules that hold such parameters.

An optimised model keeps its modules and the same parameter objects under the same names, as
:class:`OffloadedParameter`, of which shape, dtype, device and ``requires_grad`` can be read. Reading or writing their
values raises ConfigError by name. So does replacing a parameter (``linear.weight = ...``,
``torch.func.functional_call``) or a module that no longer runs (PEFT's adapters): stale weights are never read.
``state_dict``, ``load_state_dict``, ``model.to(dtype)``, copies and pickles of the model work, since modules get the
values from the sparse layer. :func:`torch_pi2.restore` undoes everything, bit for bit.
"""

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from torch_pi2.errors import ConfigError

#: Properties and methods of a tensor that need no values.
_PROPERTIES = {"shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "grad_fn", "grad"}
_QUERIES = {"dim", "size", "numel", "nelement", "ndimension", "element_size", "is_floating_point", "is_complex"}
_QUERIES |= {"__len__"}
#: Further methods of an offloaded parameter: about autograd, or about the object itself.
_OFFLOADED_QUERIES = {"requires_grad_", "untyped_storage", "get_device", "is_shared", "is_pinned", "is_contiguous"}
_FIX = "Call torch_pi2.restore(model) first, or use model.state_dict() and model.load_state_dict()."


def is_metadata(func: Any) -> bool:
    """Attribute getters (``x.shape``, but not ``x.T`` or ``x.data``) and size queries."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        owner = _property(func)
        return owner in _PROPERTIES or owner.startswith("is_")
    return name in _QUERIES


def _property(func: Any) -> str:
    return str(getattr(getattr(func, "__self__", None), "__name__", ""))


class OffloadedParameter(nn.Parameter):
    """A parameter without memory (``nbytes`` is 0), whose values are in a sparse layer; see :func:`free_storage` and
    :func:`restore_storage`. Code that bypasses Python (DLPack) sees NaN.
    """

    _pi2_name: str
    _pi2_class: type[nn.Parameter]

    @staticmethod
    def make(
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        requires_grad: bool = False,
        kind: type[nn.Parameter] = nn.Parameter,
    ) -> "OffloadedParameter":
        """A parameter that never had storage."""
        return _offloaded(nn.Parameter(_hollow(shape, dtype), requires_grad=requires_grad), name, kind)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "element_size" or (name == "__get__" and _property(func) == "nbytes"):
            return 0
        if name == "__set__" and _property(func) in ("requires_grad", "grad"):
            known = True
        else:
            known = is_metadata(func) or name in _OFFLOADED_QUERIES
        if not known:
            raise _no_values(name if name not in ("__get__", "__set__") else _property(func), (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def set_(self, *args: Any, **kwargs: Any) -> Any:  # bypasses __torch_function__
        raise _no_values("set_", self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"OffloadedParameter({self._pi2_name}, {tuple(self.shape)}, {self.dtype}: in a sparse layer)"

    def __deepcopy__(self, memo: dict[int, Any]) -> "OffloadedParameter":
        if id(self) not in memo:
            memo[id(self)] = OffloadedParameter.make(*self.__reduce_ex__(2)[1])
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = (self._pi2_name, tuple(self.shape), self.dtype, self.requires_grad, self._pi2_class)
        return OffloadedParameter.make, state


def _no_values(use: str, tree: Any) -> ConfigError:
    names = [leaf._pi2_name for leaf in tree_leaves(tree) if isinstance(leaf, OffloadedParameter)]
    expected, found = "a parameter with its values", "that of an optimised model, whose values are in a sparse layer"
    return ConfigError(f"{use} of {names[0] if names else 'a parameter'}", expected=expected, found=found, fix=_FIX)


def _hollow(shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
    """One NaN, expanded: it needs no memory, and PyTorch refuses in-place changes."""
    return torch.full((), float("nan"), dtype=dtype, device="cpu").expand(tuple(shape))


def _offloaded(parameter: nn.Parameter, name: str, kind: type[nn.Parameter]) -> OffloadedParameter:
    parameter.__class__ = OffloadedParameter
    assert isinstance(parameter, OffloadedParameter)
    parameter._pi2_name, parameter._pi2_class = name, kind
    return parameter


def free_storage(parameter: nn.Parameter, name: str, like: torch.Tensor) -> None:
    """Free the memory of ``parameter``, called ``name`` in messages, with shape and dtype of ``like``."""
    parameter.data = _hollow(like.shape, like.dtype)
    _offloaded(parameter, name, type(parameter))


def restore_storage(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Undo :func:`free_storage`."""
    assert isinstance(parameter, OffloadedParameter)
    parameter.__class__ = parameter._pi2_class  # type: ignore[assignment]
    del parameter._pi2_name, parameter._pi2_class
    parameter.data = value


class WeightOwner(Protocol):
    """The owner of offloaded values, by parameter names in the site: a sparse layer."""

    def dense_value(self, name: str) -> torch.Tensor:
        """A copy of the parameter ``name``."""

    def load_value(self, name: str, value: torch.Tensor) -> None:
        """Replace the weights of the parameter ``name``."""

    def shape_of(self, name: str) -> torch.Tensor:
        """A ``meta`` tensor with its shape and dtype."""

    def check_float(self, what: str) -> None:
        """Raises ConfigError, about ``what``: the values are quantised."""


class _Guarded(dict[str, Any]):
    """A mapping whose items are all assigned by ``__setitem__``."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        for name, value in dict(*args, **kwargs).items():
            self[name] = value


class GuardedParameters(_Guarded):
    """``_parameters`` of a module that does not compute with (some of) them: assigning others raises ConfigError.
    Hidden from ``torch.export``, which would make them inputs. ``names``: local name of a guarded parameter -> its name
    in the site. ``owner``: has their values; None: they cannot be restored.
    """

    def __init__(self, parameters: Mapping[str, Any], names: Mapping[str, str], owner: Any) -> None:
        super().__init__(parameters)
        self.names, self.owner = dict(names), owner

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self.names and self.get(name) is not value:
            raise _not_heeded(self.names[name])
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        if name in self.names:
            raise _not_heeded(self.names[name])
        super().__delitem__(name)

    def items(self) -> Any:
        if getattr(getattr(torch.export, "_trace", None), "_EXPORT_FLAGS", None) is not None:  # within torch.export
            return {name: p for name, p in super().items() if name not in self.names}.items()
        return super().items()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return GuardedParameters, (dict(dict.items(self)), self.names, self.owner)


class GuardedModules(_Guarded):
    """``_modules`` of a module that no longer calls them, for the FFN ``key``: replacing one raises ConfigError."""

    def __init__(self, modules: Mapping[str, Any], key: str) -> None:
        super().__init__(modules)
        self.key = key

    def __setitem__(self, name: str, value: Any) -> None:
        if self.get(name, value) is not value:
            raise _not_heeded(f"{name} of {self.key}")
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        raise _not_heeded(f"{name} of {self.key}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        return GuardedModules, (dict(self), self.key)


def _not_heeded(name: str) -> ConfigError:
    found = "a layer that does not compute with it, and would not see it"
    return ConfigError(f"assigning {name}", expected="a model that is not optimised", found=found, fix=_FIX)


class _Method:
    """``function(module, ...)`` as an attribute of ``module``, weakly referenced: a cycle would keep weights alive."""

    def __init__(self, function: Callable[..., Any], module: nn.Module) -> None:
        self._function, self._module = function, weakref.ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self._module(), *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Method":
        return _Method(self._function, copy.deepcopy(self._module(), memo))  # type: ignore[arg-type]

    def __reduce__(self) -> Any:
        return _Method, (self._function, self._module())


def apply_without_offloaded(module: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
    """``_apply`` of a module with offloaded parameters, which get ``fn``'s dtype."""
    guarded = module._parameters
    assert isinstance(guarded, GuardedParameters)
    entries = dict(dict.items(guarded))
    offloaded = {name: p for name, p in entries.items() if isinstance(p, OffloadedParameter)}
    module.__dict__["_parameters"] = {name: p for name, p in entries.items() if name not in offloaded}
    try:
        nn.Module._apply(module, fn, recurse)
    finally:
        now = module._parameters
        parameters = {name: now.get(name, p) for name, p in entries.items()}
        module.__dict__["_parameters"] = GuardedParameters(parameters, guarded.names, guarded.owner)
    for parameter in offloaded.values():
        dtype = fn(torch.empty(0, dtype=parameter.dtype, device="cpu")).dtype
        with torch._C.DisableTorchFunctionSubclass():
            parameter.data = _hollow(parameter.shape, dtype)
    return module


def _save_to_state_dict(module: Any, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
    """Save a twin that has the values, since other threads may run or save ``module`` meanwhile."""
    guarded, twin = module._parameters, object.__new__(type(module))
    owner, names = guarded.owner, guarded.names
    own = dict.items(guarded)
    values = {n: owner.dense_value(names[n]) if isinstance(p, OffloadedParameter) else p for n, p in own}
    twin.__dict__ |= module.__dict__ | {"_parameters": values}
    type(module)._save_to_state_dict(twin, destination, prefix, False)


def _load_from_state_dict(module: Any, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
    guarded = module._parameters
    if not any(prefix + name in state_dict for name in guarded.names):
        type(module)._load_from_state_dict(module, state_dict, prefix, *args)
        return
    if _SHARED in module.__dict__:
        what = f"other weights for {prefix.rstrip('.')}"
        expected, found = "a linear layer of one feed-forward layer", "one that several sparse layers have copies of"
        raise ConfigError(what, expected=expected, found=found, fix="Call torch_pi2.restore(model) first.")
    guarded.owner.check_float(f"other weights for {prefix.rstrip('.')}")
    freed = [name for name, p in dict.items(guarded) if isinstance(p, OffloadedParameter)]
    take_back(module)
    try:
        type(module)._load_from_state_dict(module, state_dict, prefix, *args)
        for name, of_site in guarded.names.items():
            guarded.owner.load_value(of_site, module._parameters[name].detach())
    finally:
        offload(module, guarded.names, guarded.owner, freed)


#: Attribute of a module whose values are in several sparse layers, of which ``owner`` is the last.
_SHARED = "_pi2_shared"

_METHODS: dict[str, Callable[..., Any]] = {fn.__name__: fn for fn in (_save_to_state_dict, _load_from_state_dict)}
_METHODS["_apply"] = apply_without_offloaded


def offload(
    module: nn.Module, names: Mapping[str, str], owner: WeightOwner, freed: Iterable[str], shared: bool = False
) -> None:
    """Move values of ``names`` of ``module`` to ``owner``; free those ``freed``. ``shared``: it also runs elsewhere."""
    for name in freed:
        parameter: Any = module._parameters[name]
        if not isinstance(parameter, OffloadedParameter):  # registered in two modules of the layer
            free_storage(parameter, names[name], owner.shape_of(names[name]))
    before = module._parameters
    if shared or (isinstance(before, GuardedParameters) and before.owner is not owner):
        module.__dict__[_SHARED] = True
    module.__dict__["_parameters"] = GuardedParameters(before, names, owner)
    module.__dict__ |= {name: _Method(function, module) for name, function in _METHODS.items()}


def take_back(module: nn.Module) -> None:
    """Undo :func:`offload`: ``module`` has ordinary parameters again."""
    guarded = module._parameters
    assert isinstance(guarded, GuardedParameters)
    for name, parameter in dict.items(guarded):
        if isinstance(parameter, OffloadedParameter):
            restore_storage(parameter, guarded.owner.dense_value(guarded.names[name]))
    module.__dict__["_parameters"] = dict(dict.items(guarded))
    for name in (*_METHODS, _SHARED):
        module.__dict__.pop(name, None)
