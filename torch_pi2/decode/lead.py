"""``lead``: the first process of a group makes calls, and the others repeat them."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from torch_pi2.base.fields import checked
from torch_pi2.base.uncompiled import uncompiled
from torch_pi2.decode.broadcast import BROADCAST_CALLS, coordinator_of, group_of
from torch_pi2.decode.decoder import Decoder, check_vocabulary
from torch_pi2.distributed.coordinator import Call, Coordinator, follow
from torch_pi2.distributed.group import of_each
from torch_pi2.errors import ConfigError
from torch_pi2.layers.prompt import call_mode, sparse_only

_MODEL = "model"


@checked
def lead(model: nn.Module) -> Coordinator | None:
    """Let the first of several processes, which each have a shard of ``model``, decide what all of them compute.

    Every process calls this once. The first gets a :class:`~torch_pi2.distributed.coordinator.Coordinator` at once. In
    the others this function repeats the first's calls of :class:`Decoder`, :func:`torch_pi2.generate`,
    ``model.generate`` and ``model(...)`` (of numbers, text and tensors), and returns None when the coordinator is
    closed. Calls from several threads run one after another. Budgets, plans and statistics are not shared.

    Raises:
        ConfigError: no other process has a shard of the model, or it already has a coordinator. GroupError: another
            process has ended, hangs, or has failed.
    """
    group = group_of(model)
    if group is None or group.coordinated:
        expected = "a model in shards, which several processes compute and no coordinator leads yet"
        found = "one that this process computes alone" if group is None else "one that has a coordinator"
        fix = "Call it once in every process, after torch_pi2.load of a folder of shards."
        raise ConfigError("lead(model)", expected=expected, found=found, fix=fix)
    of_each(lambda: None)  # some of them may take long to load
    if group.rank:
        follower = _Follower(model)
        follow(group, follower.make, follower.forget)
        return None
    coordinator = Coordinator(group)
    if not isinstance(model, _BroadcastModel):
        model.__class__ = type(type(model).__name__, (_BroadcastModel, type(model)), {})
    return coordinator


class _BroadcastModel:
    """Mixin that broadcasts calls of a model."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        coordinator = coordinator_of(self)  # type: ignore[arg-type]
        if coordinator is None:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        ids = kwargs.get("input_ids", next(iter(args), None))
        if isinstance(ids, torch.Tensor):  # refused before the others begin something that would fail halfway
            check_vocabulary(self, ids)  # type: ignore[arg-type]
        return _broadcast(coordinator, super().__call__, args, kwargs)  # type: ignore[misc]


@uncompiled(reason="the call is broadcast to other processes, which do not compile it")
def _broadcast(coordinator: Coordinator, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    with coordinator.call(Call(_MODEL, None, args, kwargs, call_mode.sparse_only)):
        return call(*args, **kwargs)


class _Follower:
    """Repeats the coordinator's calls with this process's ``model`` and Decoders."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._decoders: dict[int, Decoder] = {}

    def forget(self, gone: Sequence[int]) -> None:
        for number in gone:
            self._decoders.pop(number, None)

    def make(self, call: Call) -> None:
        with torch.no_grad(), sparse_only() if call.sparse else nullcontext():
            if call.target is None:
                self._model(*call.args, **call.kwargs)
            elif call.name == Decoder.__name__:
                self._decoders[call.target] = Decoder(self._model, **call.kwargs)
            elif call.name in BROADCAST_CALLS:
                getattr(self._decoders[call.target], call.name)(*call.args, **call.kwargs)
