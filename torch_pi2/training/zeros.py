"""Neuron activations in forward passes: the share of exact zeros, and a penalty on the others."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from torch_pi2.base.fields import Field
from torch_pi2.base.modules import evaluating
from torch_pi2.errors import NonFiniteError, UnsupportedModelError
from torch_pi2.types.site import FFNSite

#: Values below this fraction of a token's root mean square count as near zero.
_SOFT = 0.1

#: Sums a tensor over all processes.
Reduce = Callable[[torch.Tensor], torch.Tensor]


class Zeros:
    """Hooks on the inputs of the ``down`` projections of ``model``: the neurons' values, ``[..., I]``."""

    def __init__(self, model: nn.Module, sites: Sequence[FFNSite]) -> None:
        self.sites = list(sites)
        self._values: list[list[torch.Tensor]] = [[] for _ in sites]
        self._hooks = []
        for layer, site in enumerate(sites):
            down = model.get_submodule(site.down.weight.rpartition(".")[0])
            hook = partial(self._see, layer)
            self._hooks.append(down.register_forward_pre_hook(hook))

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _see(self, layer: int, _module: nn.Module, inputs: Any) -> None:
        self._values[layer].append(inputs[0])

    def take(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The last pass's penalty and zeros ``[layers]``. Raises UnsupportedModelError: ``down`` is not called."""
        for site, values in zip(self.sites, self._values):
            if not values:
                what, found = f"training of {site.key} ({site.owner_class})", "none: its weight is used in another way"
                expected = f"a call of {site.down.weight.rpartition('.')[0]}, which reads the neurons' values"
                fix = "Models whose FFNs are three modules, as Llama's, can be trained."
                raise UnsupportedModelError(what, expected=expected, found=found, fix=fix)
        size = [sum(h.numel() for h in values) for values in self._values]
        sums = [torch.stack([_soft_count(h).sum() for h in values]).sum() for values in self._values]
        zeros = [torch.stack([(h == 0).sum() for h in values]).sum() for values in self._values]
        for values in self._values:
            values.clear()
        penalty = torch.stack([total / n for total, n in zip(sums, size)]).mean()
        return penalty, torch.stack([count / n for count, n in zip(zeros, size)])


def _soft_count(h: torch.Tensor) -> torch.Tensor:
    """``|h| / (|h| + rms / 10)``, with the rms over the token's values: about 1 for values that are not near zero.

    The mean is nearly the share of non-zeros (the potential of Geman and Reynolds, 1992). L1 shrinks large values as
    much as the small ones that become zeros, and costs more loss at the same share.
    """
    size = h.float().abs()
    return size / (size + _SOFT * size.detach().square().mean(-1, keepdim=True).sqrt().clamp_min(1e-12))


@dataclass(frozen=True)
class Measured:
    """Loss, penalty (:meth:`Zeros.take`) and share of exact zeros by layer on held-out windows."""

    nats_per_token: float
    penalty: float
    zeros: dict[str, float]

    @property
    def mean_zeros(self) -> float:
        return sum(self.zeros.values()) / len(self.zeros)


def next_token_loss(logits_BTV: torch.Tensor, ids_BT: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """Negative log likelihood in nats of every token but the first of each row."""
    return F.cross_entropy(logits_BTV[:, :-1].float().flatten(0, 1), ids_BT[:, 1:].flatten(), reduction=reduction)


def measure(
    model: Any,
    zeros: Zeros,
    windows_NT: torch.Tensor,
    *,
    batch: int = 4,
    part: tuple[int, int] = (0, 1),
    reduce: Reduce = lambda sums: sums,
) -> Measured:
    """Loss and zeros of ``model``, which has the hooks of ``zeros``, on ``windows_NT``. ``part``: rank and number of
    the processes that share the windows; ``reduce``: sums over them. Raises NonFiniteError: the loss is NaN or
    infinite. UnsupportedModelError: as :meth:`Zeros.take`.
    """
    device = next(model.parameters()).device
    sums = torch.zeros(3 + len(zeros.sites), dtype=torch.float64, device=device)
    with evaluating(model):
        for ids_BT in windows_NT[part[0] :: part[1]].split(batch):
            ids_BT = ids_BT.to(device, torch.long)
            nats = next_token_loss(model(input_ids=ids_BT, use_cache=False).logits, ids_BT, "sum")
            penalty, shares_L = zeros.take()
            rows = len(ids_BT)
            sums += torch.cat([torch.stack([nats, penalty * rows, torch.full_like(nats, rows)]), shares_L * rows])
    nats, penalty, rows, *shares = reduce(sums).tolist()
    if not math.isfinite(nats):
        fix = "Use a smaller learning rate; check the checkpoint."
        Field(nats, "loss on held-out text", fix, NonFiniteError).wrong("a finite number", str(nats))
    tokens = rows * (windows_NT.shape[1] - 1)
    return Measured(nats / tokens, penalty / rows, {s.key: z / rows for s, z in zip(zeros.sites, shares)})
