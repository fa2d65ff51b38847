"""Layers of which each process of a group has some chunks of neurons (docs/DISTRIBUTED.md): results are added up.

All processes compute the same model on the same inputs, but of a feed-forward layer only the neurons of their shard.
What they find is gathered by ``torch.distributed`` and added by each of them in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_pi2.base.group import Group
from torch_pi2.layers.experts import OffloadedExperts
from torch_pi2.layers.offloaded import OffloadedFFN
from torch_pi2.ops.constants import constants
from torch_pi2.types.shard import Shard

#: Tokens whose logits are sent to all: those of a step, not of a text that is scored.
_AGREED_TOKENS = 64


class Share:
    """Which part of a layer this process has, and how the parts of all become one result.

    Args:
        group: of all processes. shards: theirs, by rank. key: of the layer.
        reduction: see :class:`~torch_pi2.types.shard.GroupConfig`.
    """

    def __init__(self, group: Group, shards: Sequence[Shard], key: str, reduction: str) -> None:
        chunks = [shard.layers[key].chunks for shard in shards]
        self.group, core = group, constants()
        #: Calls for fewer tokens have sums by chunk, as one machine has.
        self.by_chunk_below = min(core.gemm_tokens, core.stream_from) if reduction == "chunks" else 0
        self.own, self.most = len(chunks[group.rank]), max(map(len, chunks))
        places = {chunk: rank * self.most + i for rank, mine in enumerate(chunks) for i, chunk in enumerate(mine)}
        #: In the order of the layer's chunks, where their sums are among all that are gathered.
        self.order = [places[chunk] for chunk in sorted(places)]

    def add_chunks(self, own_CTH: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
        """The sums of all chunks, one by one in the layer's order, and the ``bias``: shape and dtype of ``x``."""
        if self.own < self.most:
            own_CTH = torch.cat([own_CTH, own_CTH.new_zeros(self.most - self.own, *own_CTH.shape[1:])])
        found: torch.Tensor = torch.ops.pi2.add_parts(self.group.gather(own_CTH), self.order, bias, x)
        return found

    def add_ranks(self, own: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The sum of all processes' ``own``, float32 ``[..., H]``, in the order of ranks: shape and dtype of ``x``."""
        parts_RTH = self.group.gather(own.reshape(1, -1, own.shape[-1]))
        found: torch.Tensor = torch.ops.pi2.add_parts(parts_RTH, list(range(self.group.size)), None, x)
        return found


def computed_together(group: Group, work: Callable[..., torch.Tensor], *arguments: Any, **named: Any) -> torch.Tensor:
    """``work(*arguments, **named)`` within :meth:`Group.together`; in a graph whoever runs it is (``Decoder``)."""
    if torch.compiler.is_compiling():
        return work(*arguments, **named)
    with group.together():
        return work(*arguments, **named)


class ShardedFFN(OffloadedFFN):
    """An ``OffloadedFFN`` of which this process has a shard; all processes of the group must make the same calls."""

    share: Share

    def _stored(self, x: torch.Tensor, asked: tuple[Any, ...], n_hot: int, threshold: float) -> torch.Tensor:
        """With sums by chunk: the bits of one machine, of so few tokens that it adds chunks, too."""
        return computed_together(self.share.group, self._summed, x, asked, n_hot, threshold)

    def _summed(self, x: torch.Tensor, asked: tuple[Any, ...], n_hot: int, threshold: float) -> torch.Tensor:
        if x.numel() // self.site.hidden < self.share.by_chunk_below:
            own_CTH = self._call(x, asked, n_hot, threshold, None, self.share.own)
            return self.share.add_chunks(own_CTH, self.bias_down, x)
        bias = self.bias_down if self.share.group.rank == 0 else None
        return self.share.add_ranks(self._call(x.float(), asked, n_hot, threshold, bias, 0), x)


class ShardedExperts(OffloadedExperts):
    """``OffloadedExperts`` of each of which this process has a shard. Sums are by rank."""

    share: Share

    def compute(self, x: torch.Tensor, index: torch.Tensor, routing: torch.Tensor, first: int = 0) -> torch.Tensor:
        """See the base class."""
        return computed_together(self.share.group, self._summed, x, index, routing, first)

    def _summed(self, x: torch.Tensor, index: torch.Tensor, routing: torch.Tensor, first: int) -> torch.Tensor:
        return self.share.add_ranks(super().compute(x.float(), index, routing, first), x)

    def biases(self) -> list[torch.Tensor | None]:
        """See the base class; the bias of the down matrix is added once."""
        *first, down = super().biases()
        return [*first, down if self.share.group.rank == 0 else None]


def agree_on_logits(model: Any, group: Group) -> None:
    """From now on the head of ``model``, a transformers model, gives in all processes what it gives in the first.

    Those have the same weights and kernels, and yet PyTorch's float products may differ in last bits with the number of
    threads: where two tokens are nearly as likely, processes would choose different ones and go on with different text.
    """
    head = model.get_output_embeddings()
    if head is not None:
        head.__class__ = type(type(head).__name__, (_FirstSays, type(head)), {"group": group})


class _FirstSays:
    """Before the class of a head among its bases."""

    group: Group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(x)  # type: ignore[misc]
        tokens = y.numel() // y.shape[-1]
        if tokens > _AGREED_TOKENS and tokens != len(y):  # a step has one for each sequence, however many there are
            return y
        return computed_together(self.group, self.group.of, y, 0)
