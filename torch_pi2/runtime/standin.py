"""``StandIn``: a module in the place of another one, whose parameters' memory has moved into a ``SparseFFN``.

The original module is kept, unregistered and with empty parameters, so that restoring is exact. Outside, the
model still looks dense: ``state_dict`` carries the original names and values, and loading a dense
``state_dict`` works.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torch_pi2.errors import ConfigError

if TYPE_CHECKING:
    from torch_pi2.runtime.experts import SparseExperts
    from torch_pi2.runtime.ffn import SparseFFN

_log = logging.getLogger("torch_pi2")


class StandIn(nn.Module):
    """Base of everything that a rewrite puts into a model.

    Attributes set by :meth:`stand_for`, kept out of ``_modules`` by tuples so that they are not registered:
        _original: ``(module,)`` that stood here; empty for a free-standing module.
        _home: ``(SparseFFN,)`` (or ``(SparseExperts,)``) that holds the values.
        _names: parameter name within the original -> fully-qualified name in the site.
        _keyword: name of the first argument of the original's forward.
        _released: those names whose memory was given back (a parameter tied to something outside keeps its).
    """

    def __init__(self) -> None:
        super().__init__()
        self._original: tuple[nn.Module, ...] = ()
        self._home: tuple[SparseFFN | SparseExperts, ...] = ()
        self._names: dict[str, str] = {}
        self._keyword = "x"
        self._released: tuple[str, ...] = ()

    def stand_for(self, original: nn.Module, home: SparseFFN | SparseExperts, names: Mapping[str, str]) -> None:
        """Take the place of ``original``; its parameters ``names`` live in ``home`` (see the class)."""
        self._original, self._home, self._names = (original,), (home,), dict(names)
        self._keyword = next(iter(inspect.signature(original.forward).parameters), "x")
        self.training = original.training

    def only_input(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
        """The one tensor of a call, given by position or by the name that the original has for it.

        Raises:
            ConfigError: there are other arguments; what the original does with them is not known here.
        """
        given = args if not kwargs else (*args, *(v for k, v in kwargs.items() if k == self._keyword))
        if len(given) == len(args) + len(kwargs) == 1 and isinstance(given[0], torch.Tensor):
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
        return self._original[0]

    def release(self, names: tuple[str, ...]) -> None:
        """Give the memory of these parameters of the original back; their values live in the bundles."""
        self._released = names
        for name in names:
            parameter = self.original.get_parameter(name)
            parameter.data = torch.empty(0, dtype=parameter.dtype)

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
            self.original.get_parameter(name).data = values[self._names[name]]
        self._released = ()

    @contextmanager
    def _dense(self) -> Iterator[None]:
        """The original with its values, and back into the bundles whatever was changed meanwhile."""
        released = self._released
        self.refill()
        try:
            yield
        finally:
            home = self._home[0]
            changed = False
            for name, site_name in self._names.items():
                changed |= home.assign(site_name, self.original.get_parameter(name).detach())
            if changed and home.method in ("lowrank", "signbit", "threshold"):
                _log.warning(
                    "%s got other weights, but keeps a %s plan made from the old ones: optimise the model again",
                    home.site.key,
                    home.method,
                )
            self.release(released)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not self._original:
            return
        values = self._home[0].dense_values() if self._released else {}
        for name, value in self.original.state_dict(keep_vars=keep_vars).items():
            destination[prefix + name] = values[self._names[name]] if name in self._released else value

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
        for original in self._original:
            original._apply(fn, recurse)
        return self

    def train(self, mode: bool = True) -> StandIn:
        super().train(mode)
        for original in self._original:
            original.train(mode)
        return self

    def __getattr__(self, name: str) -> Any:
        """What the surrounding code may read of the original: ``in_features``, ``weight.dtype``, ``act_fn``.

        A released parameter appears as a ``meta`` tensor of its shape: reading its dtype works, computing with
        it fails loudly.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = self.__dict__.get("_original", ())
            if not original or name.startswith("__"):
                raise
            if name in self.__dict__.get("_released", ()):
                return self._home[0].shape_of(self._names[name])
            return getattr(original[0], name)


class Absorbed(StandIn):
    """Stands for an activation or down projection that the ``SparseFFN`` before it has already computed."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.only_input(args, kwargs)
