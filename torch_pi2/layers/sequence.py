"""An FFN that is a sequence of modules inside a bigger block: the first computes everything, the others pass on the
``FusedOutput``. Each checks its position, so a missing or replaced one is an error.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves

from torch_pi2.errors import ConfigError
from torch_pi2.types.site import FFNSite


def only_input(keyword: str, key: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The only argument of a call, by position or as ``keyword``. Raises ConfigError for any others."""
    given = args if not kwargs else (*args, *(v for k, v in kwargs.items() if k == keyword))
    if len(given) == len(args) + len(kwargs) == 1 and isinstance(given[0], torch.Tensor | FusedOutput):
        return given[0]
    found = [type(a).__name__ for a in args] + [f"{k}={type(v).__name__}" for k, v in kwargs.items()]
    expected = f"one tensor, by position or as {keyword}="
    fix = "Leave the other arguments out, or torch_pi2.restore(model) and plan without this layer."
    raise ConfigError(f"arguments of {key}", expected=expected, found=", ".join(found) or "none", fix=fix)


class FusedOutput:
    """The result of an FFN on its way through the modules after its first linear; any other use raises ConfigError."""

    def __init__(self, ffn: torch.Tensor, site: FFNSite) -> None:
        self.ffn, self.site, self.at = ffn, site, 1
        self.dtype, self.device = ffn.dtype, ffn.device

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs))
        next(leaf for leaf in leaves if isinstance(leaf, FusedOutput))._refuse()

    def _refuse(self, *_: Any) -> NoReturn:
        raise _out_of_order(self.site, "an operation on its result")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __getitem__ = _refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise _out_of_order(self.site, f"{name} of its result")

    def __repr__(self) -> str:
        return f"FusedOutput({self.site.key}: its FFN's result, for the modules after it)"


def _out_of_order(site: FFNSite, found: str) -> ConfigError:
    expected = f"its modules one after another, from {site.up.weight.rpartition('.')[0]} on"
    expected = f"{expected}: an optimised model computes them as one"
    fix = "Call the whole block, or torch_pi2.restore(model) first."
    return ConfigError(f"calling a part of {site.key} by hand", expected=expected, found=found, fix=fix)


class FusedIdentity:
    """``forward`` of the module at ``position`` (from 0) of an FFN: passes on a :class:`FusedOutput` only."""

    def __init__(self, site: FFNSite, position: int, last: bool) -> None:
        self.site, self.position, self.last, self.keyword = site, position, last, "input"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x = only_input(self.keyword, self.site.key, args, kwargs)
        if not isinstance(x, FusedOutput):
            raise _out_of_order(self.site, "a tensor of something else")
        if x.site.key != self.site.key or x.at != self.position:
            raise _out_of_order(self.site, "what another module gave than the one before it, which may be missing")
        x.at += 1
        return x.ffn if self.last else x
