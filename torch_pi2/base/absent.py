"""What an optimised model no longer has, and how it says so.

The values of an FFN's parameters are in its sparse layer. The parameters themselves stay, the same objects under the
same names (``named_parameters``, ``model.mlp.up_proj.weight``, a variable of the caller), as
:class:`AbsentParameter`: they can be asked for shape, dtype, device and ``requires_grad``, and counted. Whatever
would read or change their values raises ConfigError by name, wherever the parameter was got from. So do the calls of a
layer for which other parameters were put in (``torch.func.functional_call``, ``linear.weight = ...``), and hooks
registered on a module that does not run any more. :func:`torch_pi2.restore` undoes all of it, bit for bit.

What goes on working, because the values are asked of the sparse layer: ``state_dict``, ``load_state_dict``,
``model.to(dtype)``, copies and pickles of the model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from torch_pi2.errors import ConfigError

#: Properties and methods that tell nothing about values.
_PROPERTIES = {"shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "grad_fn", "grad"}
_QUERIES = {
    "dim",
    "size",
    "numel",
    "nelement",
    "ndimension",
    "element_size",
    "is_floating_point",
    "is_complex",
    "__len__",
}
#: Those of an absent parameter besides: what says something about autograd, or the object itself.
_ABSENT_QUERIES = {"requires_grad_", "untyped_storage", "get_device", "is_shared", "is_pinned", "is_contiguous"}
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


class AbsentParameter(nn.Parameter):
    """A parameter whose values are in a sparse layer; :func:`take` makes one of a parameter, :func:`give` undoes it.

    It takes no memory: ``element_size()`` and ``nbytes`` are 0, while ``numel()`` counts as in the dense model. What
    gets past Python (DLPack) sees NaN.
    """

    _pi2_name: str
    _pi2_class: type[nn.Parameter]

    @staticmethod
    def made(
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        requires_grad: bool = False,
        kind: type[nn.Parameter] = nn.Parameter,
    ) -> AbsentParameter:
        """One that never was another."""
        parameter = nn.Parameter(_hollow(shape, dtype), requires_grad=requires_grad)
        return _become_absent(parameter, name, kind)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "element_size" or (name == "__get__" and _property(func) == "nbytes"):
            return 0
        if name == "__set__" and _property(func) in ("requires_grad", "grad"):
            known = True
        else:
            known = is_metadata(func) or name in _ABSENT_QUERIES
        if not known:
            raise _absent(name if name not in ("__get__", "__set__") else _property(func), (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def set_(self, *args: Any, **kwargs: Any) -> Any:  # PyTorch does not ask __torch_function__ of it
        raise _absent("set_", self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"AbsentParameter({self._pi2_name}, {tuple(self.shape)}, {self.dtype}: in a sparse layer)"

    def __deepcopy__(self, memo: dict[int, Any]) -> AbsentParameter:
        if id(self) not in memo:
            memo[id(self)] = AbsentParameter.made(*self.__reduce_ex__(2)[1])
        copy: AbsentParameter = memo[id(self)]
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return AbsentParameter.made, (
            self._pi2_name,
            tuple(self.shape),
            self.dtype,
            self.requires_grad,
            self._pi2_class,
        )


def _absent(use: str, tree: Any) -> ConfigError:
    names = [leaf._pi2_name for leaf in tree_leaves(tree) if isinstance(leaf, AbsentParameter)]
    return ConfigError(
        f"{use} of {names[0] if names else 'a parameter'}",
        expected="a parameter with its values",
        found="that of an optimised model, whose values are in a sparse layer",
        fix=_FIX,
    )


def _hollow(shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
    """One NaN that looks like many: no memory, and in-place changes are errors of PyTorch."""
    return torch.full((), float("nan"), dtype=dtype, device="cpu").expand(tuple(shape))


def take(parameter: nn.Parameter, name: str, like: torch.Tensor) -> None:
    """Give the memory of ``parameter`` back. It goes by ``name`` in messages and has shape and dtype of ``like``."""
    parameter.data = _hollow(like.shape, like.dtype)
    _become_absent(parameter, name, type(parameter))


def _become_absent(parameter: nn.Parameter, name: str, kind: type[nn.Parameter]) -> AbsentParameter:
    parameter.__class__ = AbsentParameter
    assert isinstance(parameter, AbsentParameter)
    parameter._pi2_name, parameter._pi2_class = name, kind
    return parameter


def give(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Undo :func:`take`; a parameter that is not absent is left as it is."""
    if isinstance(parameter, AbsentParameter):
        parameter.__class__ = parameter._pi2_class  # type: ignore[assignment]
        del parameter._pi2_name, parameter._pi2_class
        parameter.data = value


def _convert(parameter: AbsentParameter, fn: Any) -> None:
    """What ``model.to(dtype)`` does to a parameter."""
    dtype = fn(torch.empty(0, dtype=parameter.dtype, device="cpu")).dtype
    with torch._C.DisableTorchFunctionSubclass():
        parameter.data = _hollow(parameter.shape, dtype)


class TakenParameters(dict[str, Any]):
    """``_parameters`` of a module that does not compute with them: others in their place stop the stand-in.

    They do not raise at once: ``torch.func.functional_call`` must be able to put back what it has changed.
    """

    def __init__(self, parameters: Mapping[str, Any], stand_in: Holder) -> None:
        super().__init__(parameters)
        self._own = dict(parameters)
        self._stand_in = weakref.ref(stand_in)  # whose they are: a cycle would keep weights until garbage is collected

    def changed(self) -> list[str]:
        """Names of which there is another parameter now, or none."""
        return [name for name, own in self._own.items() if self.get(name) is not own]

    def settle(self) -> None:
        """What is registered now is the module's own."""
        self._own = dict(dict.items(self))

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self._tell()

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self._tell()

    def _tell(self) -> None:
        stand_in = self._stand_in()
        if stand_in is not None:
            stand_in.parameters_changed()

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {"parameters": dict(dict.items(self)), "own": self._own, "stand_in": self._stand_in()}
        return type(self).__new__, (type(self),), state

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        dict.update(self, state["parameters"])  # nobody is told: the stand-in may not be whole yet
        self._own, self._stand_in = state["own"], weakref.ref(state["stand_in"])


class ListedParameters(TakenParameters):
    """Those of a stand-in under the names that they have in what it stands for (``up_proj.weight``).

    ``torch.export`` would make inputs of them, so that they are not listed while it runs.
    """

    def items(self) -> Any:
        return {}.items() if _exporting() else super().items()


def _exporting() -> bool:
    trace = getattr(torch.export, "_trace", None)
    return getattr(trace, "_EXPORT_FLAGS", None) is not None


def without_absent(taken: Iterable[TakenParameters], fn: Any, apply: Callable[[], Any]) -> None:
    """``apply()``, an ``nn.Module._apply`` of ``fn``, on all parameters but absent ones, which get ``fn``'s dtype."""
    dicts = list(taken)
    absent = {id(p): p for d in dicts for p in dict.values(d) if isinstance(p, AbsentParameter)}
    here = [(d, {name: p for name, p in dict.items(d) if id(p) in absent}) for d in dicts]
    order = [(d, list(d)) for d in dicts]
    for d, gone in here:
        for name in gone:
            dict.__delitem__(d, name)
    try:
        apply()
    finally:
        for (d, gone), (_, names) in zip(here, order, strict=True):
            parameters = {**dict(dict.items(d)), **gone}
            dict.clear(d)
            dict.update(d, {name: parameters[name] for name in names})
            d.settle()
    for parameter in absent.values():
        _convert(parameter, fn)


class Holder(nn.Module):
    """Base of modules that have values of parameters which are absent elsewhere."""

    def taken(self) -> Iterator[TakenParameters]:
        """Where the absent parameters are registered."""
        if isinstance(self._parameters, TakenParameters):
            yield self._parameters

    def parameters_changed(self) -> None:
        """Calls raise while there are others in the place of absent parameters, at no cost to calls otherwise."""
        if any(taken.changed() for taken in self.taken()):
            self.__dict__["forward"] = self._refuse
        elif getattr(self.__dict__.get("forward"), "__func__", None) is Holder._refuse:
            del self.__dict__["forward"]

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        names = dict.fromkeys(name for taken in self.taken() for name in taken.changed())
        raise ConfigError(
            f"a call with other parameters ({', '.join(names)} of {self.about()})",
            expected="the parameters that were optimised",
            found="others in their place (functional_call, or an assignment)",
            fix=_FIX,
        )

    def about(self) -> str:
        """What stands here, for messages."""
        return type(self).__name__

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        known = torch.arange(3, 67, device="cpu")
        given = fn(known)
        if given.device == known.device and not torch.equal(given, known):
            raise ConfigError(
                f"values of {self.about()}",
                expected="conversions that keep them, as model.to(dtype)",
                found="one that does not (to_empty)",
                fix="Call torch_pi2.restore(model) first.",
            )
        without_absent(self.taken(), fn, lambda: super(Holder, self)._apply(fn, recurse))
        return self

    def refuse_assignment(self, name: str) -> None:
        """Raise ConfigError: nothing would read what is assigned."""
        raise ConfigError(
            f"assigning {name} of {self.about()}",
            expected="a model that is not optimised",
            found="a layer that is computed as a whole, and would not see it",
            fix=_FIX,
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(self.__dict__.get("_parameters"), TakenParameters) and name in self._parameters:
            self.refuse_assignment(name)
        super().__setattr__(name, value)
