"""Activations the kernels know, by name. ``relu``-like ones give exact zeros (lossless sparsity).

A name may have parameters: ``silu[in=1.702,out=0.587544066,limit=7,plus=1]`` is, for a gate v and an up u,
``out * silu(in * min(v, limit)) * (clamp(u, -limit, limit) + plus)``; the defaults are 1, 1, infinity and 0. This
covers multipliers, sigmoid's approximation of GELU (CLIP), and clamped SwiGLU (gpt-oss, DeepSeek-V4).

With ``sigmas=k`` v is ``max(0, gate - mean - k * deviation)``, with mean and standard deviation of the token's gates
over all neurons: most are exactly zero (Gemma 3n's first layers, where k is the normal distribution's 0.95 quantile).

With ``rms=e`` the products of a token are divided by the root of their mean square over all neurons plus ``e``, and
multiplied by weights, which stand in place of the bias of up (BitNet's RMSNorm before down; zeros stay zeros).

With ``second=1`` gate and up change places: the first matrix of a neuron is up, which decides whether the others are
read, and the activation applies to the second (:meth:`torch_pi2.types.site.FFNSite.up_first`).
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import inf, isfinite
from typing import Any

import torch
import torch.nn.functional as F

from torch_pi2.errors import UnsupportedModelError

Activation = Callable[[torch.Tensor], torch.Tensor]

_WITH_NUMBERS = re.compile(r"(\w+)\[([^\[\]]+)\]")


@dataclass(frozen=True)
class Shaped:
    """A parsed activation; ``base`` is a name without parameters."""

    base: str
    scale_in: float = 1.0
    scale_out: float = 1.0
    limit: float = inf
    plus: float = 0.0
    sigmas: float = -inf
    second: bool = False
    rms: float = 0.0

    @property
    def text(self) -> str:
        """The text that :func:`shaped` reads; nine digits are exact for float32."""
        given = [(key, float(getattr(self, name)), usual) for key, (name, usual) in _NUMBERS.items()]
        parts = [f"{key}={value:.9g}" for key, value, usual in given if value != usual]
        return f"{self.base}[{','.join(parts)}]" if parts else self.base


#: Key of a parameter in a text -> field of :class:`Shaped`, and default.
_NUMBERS = {"in": ("scale_in", 1.0), "out": ("scale_out", 1.0), "limit": ("limit", inf), "plus": ("plus", 0.0)}
_NUMBERS |= {"sigmas": ("sigmas", -inf), "second": ("second", 0.0), "rms": ("rms", 0.0)}


@lru_cache(maxsize=1024)
def shaped(text: str) -> Shaped | None:
    """Parse the text of an activation; None if it is invalid."""
    if text in _PLAIN:
        return Shaped(text)
    found = _WITH_NUMBERS.fullmatch(text)
    if found is None or found.group(1) not in _PLAIN:
        return None
    numbers: dict[str, Any] = {}
    for part in found.group(2).split(","):
        key, _, value = part.partition("=")
        try:
            numbers[_NUMBERS[key][0]] = float(value)
        except (KeyError, ValueError):
            return None
    if not all(map(isfinite, numbers.values())):
        return None
    made = Shaped(found.group(1), **numbers | {"second": "second" in numbers})
    makes_sense = made.limit > 0 and made.second + (made.sigmas != -inf) + (made.rms != 0) <= 1 and made.rms >= 0
    return made if made.text == text and makes_sense else None


def _activated(of: Shaped, x: torch.Tensor) -> torch.Tensor:
    y = x if of.sigmas == -inf else torch.relu(x - cut(of.text, x))
    y = y if of.limit == inf else y.clamp(max=of.limit)
    y = _PLAIN[of.base](y if of.scale_in == 1.0 else y * of.scale_in)
    return y if of.scale_out == 1.0 else y * of.scale_out


def _factor(of: Shaped, x: torch.Tensor) -> torch.Tensor:
    y = x if of.limit == inf else x.clamp(-of.limit, of.limit)
    return y if of.plus == 0.0 else y + of.plus


def cuts(activation: str) -> bool:
    """Whether the activation has ``sigmas``, and so needs the gates of all neurons."""
    return _known(activation).sigmas != -inf


def norm(activation: str) -> float:
    """``rms``, what the norm before down adds to the mean square; 0: there is no norm."""
    return _known(activation).rms


def of_all(activation: str) -> bool:
    """Whether the activation needs all neurons of a token at once: it has ``sigmas`` or ``rms``."""
    return cuts(activation) or norm(activation) > 0


def cut(activation: str, gate_TI: torch.Tensor) -> torch.Tensor:
    """``[..., 1]``: the value of ``gate_TI [..., I]`` up to which an activation with ``sigmas`` is zero."""
    mean, deviation = gate_TI.mean(-1, keepdim=True), gate_TI.std(-1, keepdim=True, unbiased=False)
    return mean + _known(activation).sigmas * deviation


def on_up(activation: str, activated: bool) -> Activation:
    """The function applied to up: the ``activation`` if ``activated``, else its clamp and offset."""
    if activated:
        return ACTIVATIONS[activation]
    if activation in _PLAIN:
        return _PLAIN["identity"]
    return partial(_activated if second(activation) else _factor, _known(activation))


def scaled(activation: str, factor: float) -> str:
    """The activation times ``factor``."""
    of = _known(activation)
    return replace(of, scale_out=float(f"{of.scale_out * factor:.9g}")).text


def exact_zeros(activation: str) -> bool:
    """Whether it is exactly zero for many outputs of the first matrix, so that skipping them is lossless."""
    of = _known(activation)
    return not of.second and (of.base in SPARSE_ACTIVATIONS or cuts(activation))


def second(activation: str) -> bool:
    """Whether the activation applies to the second matrix: it has ``second``."""
    return _known(activation).second


def swapped(activation: str) -> str:
    """The activation with gate and up exchanged."""
    of = _known(activation)
    return replace(of, second=not of.second).text


def check_plain(activation: str, what: str = "kernels on a GPU") -> None:
    """Raises UnsupportedModelError unless GPU kernels (``what``) have this activation."""
    if activation not in ON_A_GPU:
        expected = f"one of {', '.join(ON_A_GPU)}: {what} have no others"
        found, fix = "numbers of its own" if "[" in activation else "another", "Keep this model on the CPU, in PyTorch."
        raise UnsupportedModelError(f"activation {activation}", expected=expected, found=found, fix=fix)


def _known(activation: str) -> Shaped:
    found = shaped(activation)
    if found is None:
        raise KeyError(activation)
    return found


class _Activations(dict[str, Activation]):
    """Iterates over plain names; builds activations with parameters on lookup."""

    def __missing__(self, text: str) -> Activation:
        return partial(_factor if second(text) else _activated, _known(text))

    def __contains__(self, text: object) -> bool:
        return isinstance(text, str) and shaped(text) is not None


_PLAIN: dict[str, Activation] = {
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "identity": lambda x: x,
}

#: name -> function, in the order of ``csrc/include/pi2/activations.inc``; also looks up texts with parameters.
ACTIVATIONS: dict[str, Activation] = _Activations(_PLAIN)

#: Activations of ``_act`` in :mod:`torch_pi2.ops.gpu.kernels`.
ON_A_GPU = ("relu", "relu2", "silu", "gelu", "gelu_tanh", "identity")

#: Exactly zero on half of the line: skipping their zeros is lossless.
SPARSE_ACTIVATIONS = frozenset({"relu", "relu2"})
