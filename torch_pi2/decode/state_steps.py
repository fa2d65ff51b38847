"""Steps of transformers' layers with recurrent states by our operators (:mod:`torch_pi2.ops.states`).

transformers computes them by packages for GPUs, or by a dozen calls of PyTorch that each read or write the whole state:
in a Nemotron-H of 14 layers more than half of a step.
"""

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from torch_pi2.ops import load

_lock = threading.Lock()
_entered = threading.local()


def _plain(*tensors: torch.Tensor | None) -> bool:
    """On a CPU, and without gradients."""
    given = [t for t in tensors if t is not None]
    return all(t.is_cpu for t in given) and not (torch.is_grad_enabled() and any(t.requires_grad for t in given))


def _selective_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    z: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor | None:
    """Mamba-2's, where A, dt and their bias are one number per head."""
    alike = A.stride()[1:] == (0, 0) and dt.stride(-1) == 0 and (dt_bias is None or dt_bias.stride(-1) == 0)
    if not (alike and state.dtype == torch.float32 and state.is_contiguous() and _plain(state, x, dt, A, B, C, D, z)):
        return None
    dt = dt[..., 0]
    dt = dt if dt_bias is None else dt + dt_bias[:, 0].to(dt.dtype)
    dt = (F.softplus(dt) if dt_softplus else dt).float()
    decay, v = (dt * A[:, 0, 0].float()).exp()[..., None], dt[..., None] * x.float()
    y: torch.Tensor = torch.ops.pi2.recurrence(state, decay, v, B.float(), C.float())
    y = y if D is None else y + x * D
    return (y if z is None else y * F.silu(z)).to(x.dtype)


def _conv_update(
    x: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> torch.Tensor | None:
    """A step of short convolutions, ``x [B, channels, 1]``."""
    given = [t for t in (x, state, weight, bias) if t is not None]
    known = x.shape[2] == 1 and activation in (None, "silu", "swish") and {t.dtype for t in given} == {x.dtype}
    if not (known and state.is_contiguous() and weight.shape[1] <= state.shape[2] + 1 and _plain(*given)):
        return None
    y: torch.Tensor = torch.ops.pi2.conv_step(x[..., 0], state, weight, bias, activation is not None)
    return y[..., None]


def _gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """One token, ``[B, 1, heads, width]``, of the gated delta rule. The state given is changed, and returned."""
    state = initial_state
    if state is None or query.shape[1] != 1 or not (state.dtype == torch.float32 and state.is_contiguous()):
        return None
    if not _plain(query, key, value, g, beta, state):
        return None
    q, k, v, decay, factor = (t[:, 0].float() for t in (query, key, value, g.exp(), beta))
    if use_qk_l2norm_in_kernel:
        q, k = (t * (t.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for t in (q, k))
    factor, decay = factor[..., None], decay[..., None]
    b = k.repeat_interleave(v.shape[1] // k.shape[1], 1)
    a, q = -decay * factor * b, q * q.shape[-1] ** -0.5
    y: torch.Tensor = torch.ops.pi2.recurrence(state, decay, factor * v, k, q, a, b, True)
    return y[:, None].to(query.dtype), state if output_final_state else None


#: Names of functions in transformers' files, and what computes the same; None as a result: it does not.
_OURS: dict[str, Callable[..., Any]] = {
    "mamba2_selective_state_update": _selective_state_update,
    "causal_conv1d_update": _conv_update,
    "torch_recurrent_gated_delta_rule": _gated_delta_rule,
}


def _choosing(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        result = ours(*args, **kwargs) if getattr(_entered, "depth", 0) else None
        return theirs(*args, **kwargs) if result is None else result

    chosen.ours = ours  # type: ignore[attr-defined]
    return chosen


@contextmanager
def fast_states(model: torch.nn.Module) -> Iterator[None]:
    """While this is entered, the layers of ``model`` that transformers has the code of take steps by our operators, in
    this thread. Elsewhere its functions, which are replaced for good, are as they were.
    """
    load()
    for name in {type(part).__module__ for part in model.modules()}:
        if name.startswith("transformers.models."):
            _replace(name)
    _entered.depth = getattr(_entered, "depth", 0) + 1
    try:
        yield
    finally:
        _entered.depth -= 1


@functools.cache
def _replace(module: str) -> None:
    with _lock:
        held = vars(sys.modules[module])
        for name, ours in _OURS.items():
            if name in held and getattr(held[name], "ours", None) is not ours:
                held[name] = _choosing(held[name], ours)
