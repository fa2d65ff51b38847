"""``StandIn``: a module in the place of another one, whose parameters' memory has moved into a ``SparseFFN``.

The original module is kept, unregistered and with absent parameters (:mod:`torch_pi2.base.absent`, which says what
may be done with them), so that restoring is exact. Outside, the model still looks dense: ``state_dict`` carries the
original names and values, ``named_parameters`` the names, and loading a dense ``state_dict`` works.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from torch_pi2.base.absent import (
    AbsentParameter,
    Holder,
    ListedParameters,
    TakenParameters,
    give,
    is_metadata,
    take,
    without_absent,
)
from torch_pi2.base.hooks import allow_assignments, allow_hooks, refuse_assignments, refuse_hooks
from torch_pi2.errors import ConfigError
from torch_pi2.types.method import LOSSY
from torch_pi2.types.site import FFNSite

_log = logging.getLogger("torch_pi2")


class Home(Protocol):
    """Where the values of replaced parameters are: a ``SparseFFN``, or ``SparseExperts``."""

    site: FFNSite
    method: str

    def dense_values(self) -> dict[str, torch.Tensor]:
        """Copies of the parameters by their names in the site."""

    def assign(self, name: str, value: torch.Tensor) -> bool:
        """Write one of them; whether it was new."""

    def shape_of(self, name: str) -> torch.Tensor:
        """A ``meta`` tensor with its shape and dtype."""

    def check_float(self, what: str) -> None:
        """Raise ConfigError if they are quantised; ``what`` was asked for."""


class StandIn(Holder):
    """Base of everything that a rewrite puts into a model.

    Attributes set by :meth:`stand_for`, kept out of ``_modules`` by tuples so that they are not registered:
        _original: ``(module,)`` that stood here; empty for a free-standing module.
        _elsewhere: ``(home,)`` that holds the values, if it is another module.
        _names: parameter name within the original -> fully-qualified name in the site.
        _keyword: name of the first argument of the original's forward.
        _released: those names whose memory was given back (a parameter tied to something outside keeps its).
        _silent: the original and modules within it, as far as they run nowhere now.
    """

    def __init__(self) -> None:
        super().__init__()
        self._original: tuple[nn.Module, ...] = ()
        self._elsewhere: tuple[Home, ...] = ()
        self._names: dict[str, str] = {}
        self._keyword = "x"
        self._released: tuple[str, ...] = ()
        self._silent: tuple[nn.Module, ...] = ()

    @property
    def _home(self) -> tuple[Any, ...]:
        """``(home,)`` that holds the values, of :class:`Home`; empty for a free-standing module."""
        return self._elsewhere or ((self,) if self._original else ())

    @property
    def is_stand_in(self) -> bool:
        """Whether it stands where another module stood; finding layers asks that of every module there is."""
        return bool(self._original)

    def stand_for(self, original: nn.Module, home: Home, names: Mapping[str, str]) -> None:
        """Take the place of ``original``; its parameters ``names`` live in ``home`` (see the class)."""
        self._original, self._names = (original,), dict(names)
        self._elsewhere = () if home is self else (home,)  # a cycle would keep weights until garbage is collected
        self._keyword = next(iter(inspect.signature(original.forward).parameters), "x")
        self.training = original.training

    def only_input(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], kind: Any = torch.Tensor) -> Any:
        """The one tensor (or another ``kind``) of a call, by position or by the name that the original has for it.

        Raises:
            ConfigError: there are other arguments; what the original does with them is not known here.
        """
        given = args if not kwargs else (*args, *(v for k, v in kwargs.items() if k == self._keyword))
        if len(given) == len(args) + len(kwargs) == 1 and isinstance(given[0], kind):
            return given[0]
        found = [type(a).__name__ for a in args] + [f"{k}={type(v).__name__}" for k, v in kwargs.items()]
        home = self._home[0] if self._home else self
        raise ConfigError(
            f"arguments of {home.site.key}",
            expected=f"one tensor, by position or as {self._keyword}=",
            found=", ".join(found) or "none",
            fix="Leave the other arguments out, or torch_pi2.restore(model) and plan without this layer.",
        )

    @property
    def original(self) -> nn.Module:
        """The module that stood here, its parameters empty until :func:`torch_pi2.restore`."""
        if not self._original:
            raise AttributeError(f"{type(self).__name__} stands for no module")
        return self._original[0]

    def named_modules(self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True) -> Any:
        """As any module's. PEFT is shown those of the original, too: putting an adapter on one is refused by name."""
        yield from super().named_modules(memo, prefix, remove_duplicate)
        if self._original and _adapters_are_put_on():
            yield from list(self.original.named_modules(prefix=prefix))[1:]

    def about(self) -> str:
        return self._home[0].site.key if self._home else super().about()

    def silence(self, modules: Iterable[nn.Module]) -> None:
        """``modules``, the original and parts of it, run nowhere now: nothing can be assigned to them.

        The parts take no hooks; those of the original are heeded here.
        """
        self._silent = tuple(modules)
        refuse_hooks((module for module in self._silent if module is not self.original), self.about())
        for module in self._silent:
            refuse_assignments(module)

    def unsilence(self) -> None:
        """Undo :meth:`silence`."""
        allow_hooks(self._silent)
        for module in self._silent:
            allow_assignments(module)
        self._silent = ()

    def release(self, names: tuple[str, ...]) -> None:
        """Give the memory of these parameters of the original back; their values live in the neurons."""
        self._released = names
        for name in names:
            take(self.original.get_parameter(name), self._names[name], self._home[0].shape_of(self._names[name]))
        own = {name: self.original.get_parameter(name) for name in self._names}
        for prefix, module in self.original.named_modules():
            if any(f"{prefix}.{name}".lstrip(".") in own for name in module._parameters):
                object.__setattr__(module, "_parameters", TakenParameters(module._parameters, self))
        object.__setattr__(self, "_parameters", ListedParameters(own, self))

    def taken(self) -> Iterator[TakenParameters]:
        yield from super().taken()
        yield from self._taken_inside()

    def _taken_inside(self) -> Iterator[TakenParameters]:
        for module in self.original.modules() if self._original else ():
            if isinstance(module._parameters, TakenParameters):
                yield module._parameters

    def check_refill(self) -> None:
        """Raise ConfigError if the values were quantised, and the original's memory is gone."""
        if self._released:
            self._home[0].check_float(f"the original weights of {self._home[0].site.key}")

    def refill(self, *, lossy: bool = False) -> None:
        """Undo :meth:`release`, bit for bit; if ``lossy``, quantised values as they are now.

        Raises:
            ConfigError: see :meth:`check_refill`.
        """
        if not lossy:
            self.check_refill()
        values = self._home[0].dense_values() if self._released else {}
        for name in self._released:
            give(self.original.get_parameter(name), values[self._names[name]])
        for module in self.original.modules():
            if isinstance(module._parameters, TakenParameters):
                object.__setattr__(module, "_parameters", dict(module._parameters))
        object.__setattr__(self, "_parameters", {})
        self.parameters_changed()
        self._released = ()

    @contextmanager
    def _dense(self) -> Iterator[None]:
        """The original with its values, and back into the neurons whatever was changed meanwhile."""
        released = self._released
        self.refill()
        try:
            yield
        finally:
            home = self._home[0]
            changed = False
            for name, site_name in self._names.items():
                changed |= home.assign(site_name, self.original.get_parameter(name).detach())
            if changed and home.method in LOSSY:
                _log.warning(
                    "%s got other weights, but keeps a %s plan made from the old ones: optimise the model again",
                    home.site.key,
                    home.method,
                )
            self.release(released)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if not self._original:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            return
        values = self._home[0].dense_values() if self._released else {}
        for name, parameter in self.original.named_parameters(remove_duplicate=False):
            if isinstance(parameter, AbsentParameter):
                destination[prefix + name] = values[self._names[name]]
            else:
                destination[prefix + name] = parameter if keep_vars else parameter.detach()

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        if not self._original:
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            )
            return
        with self._dense():
            for name, module in self.original.named_modules():
                inner = f"{prefix}{name}." if name else prefix
                module._load_from_state_dict(
                    state_dict, inner, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
                )

    def _apply(self, fn: Any, recurse: bool = True) -> StandIn:
        super()._apply(fn, recurse)
        if self._original:
            without_absent(self._taken_inside(), fn, lambda: self.original._apply(fn))
        return self

    def train(self, mode: bool = True) -> StandIn:
        super().train(mode)
        for original in self._original:
            original.train(mode)
        return self

    def __getattr__(self, name: str) -> Any:
        """What the surrounding code may read of the original: ``in_features``, ``weight.dtype``, ``act_fn``."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = self.__dict__.get("_original", ())
            if not original or name.startswith("__"):
                raise
            return getattr(original[0], name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuses what the original would have heeded and nothing reads here, as ``act_fn`` or a whole ``up_proj``."""
        original = self.__dict__.get("_original", ())
        ours = name.startswith("_") or name in self.__dict__ or name in self._buffers or hasattr(type(self), name)
        if original and not ours and name not in self._modules and hasattr(original[0], name):
            self.refuse_assignment(name)
        super().__setattr__(name, value)


def _adapters_are_put_on() -> bool:
    """Whether PEFT asks for modules to put adapters on; it would pass over what it does not see."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "inject_adapter":
            return str(frame.f_globals.get("__name__")).startswith("peft.")
    return False


class Passed(torch.Tensor):
    """The result of an FFN on its way through the modules after its first linear, which have nothing left to do.

    It is not what that linear gives, so that nobody else may compute with it.
    """

    ffn: torch.Tensor
    home: Home
    at: int

    @staticmethod
    def wrap(y: torch.Tensor, home: Home) -> Passed | Traced:
        """``y`` as what goes on to the module after the first linear."""
        if torch.compiler.is_compiling():
            return Traced(y, home.site)
        passed = y.as_subclass(Passed)
        passed.ffn, passed.home, passed.at = y, home, 1
        return passed

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if is_metadata(func) and name == "__get__" and func.__self__.__name__ not in ("shape", "ndim"):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs))
        raise _out_of_chain(
            next(leaf for leaf in leaves if isinstance(leaf, Passed)).home.site, f"{name} of its result"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Passed({self.home.site.key}: its FFN's result, for the modules after it)"


class Traced:
    """What :class:`Passed` is, where a graph is made: no tensor, so that nothing but the modules after it takes it."""

    def __init__(self, ffn: torch.Tensor, site: FFNSite) -> None:
        self.ffn, self.site, self.at = ffn, site, 1

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs))
        next(leaf for leaf in leaves if isinstance(leaf, Traced))._refuse()

    def _refuse(self, *_: Any) -> NoReturn:
        raise _out_of_chain(self.site, "an operation on its result")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __getitem__ = _refuse

    def __repr__(self) -> str:
        return f"Traced({self.site.key}: its FFN's result, for the modules after it)"


def _out_of_chain(site: FFNSite, found: str) -> ConfigError:
    return ConfigError(
        f"calling a part of {site.key} by hand",
        expected=f"its modules one after another, from {site.up.weight.rpartition('.')[0]} on: an optimised model "
        "computes them as one",
        found=found,
        fix="Call the whole block, or torch_pi2.restore(model) first.",
    )


class Absorbed(StandIn):
    """Stands for an activation or down projection that the ``SparseFFN`` before it has already computed.

    Attributes:
        position: among the FFN's modules, of which the first is 0. last: whether it is the last of them.

    Raises (when it is called):
        ConfigError: with anything but what the module before it gave.
    """

    position = 1
    last = False

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor | Passed | Traced:
        x, home = self.only_input(args, kwargs, torch.Tensor | Traced), self._home[0]
        if not isinstance(x, Traced) and (type(x) is not Passed or x.home is not home):
            raise _out_of_chain(home.site, "a tensor of something else")
        if (isinstance(x, Traced) and x.site.key != home.site.key) or x.at != self.position:
            raise _out_of_chain(
                home.site, "what another module than the one before it gave: one is missing, or is another"
            )
        x.at += 1
        return x.ffn if self.last else x
