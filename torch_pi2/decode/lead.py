"""``lead``: one process says what several compute; the others make its calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from torch_pi2.base.arguments import checked
from torch_pi2.base.calls import Call, Leader, Part, follow
from torch_pi2.base.group import Group
from torch_pi2.base.ranks import Ranks
from torch_pi2.decode.calls import LED, group_of, leader_of
from torch_pi2.decode.decode import Decoder, check_vocabulary
from torch_pi2.errors import ConfigError
from torch_pi2.layers.prompt import is_sparse_only, sparse_only

#: Name of a call of the model itself.
_MODEL = "model"


@checked
def lead(model: nn.Module) -> Leader | None:
    """Let the first process alone say what is computed by several that each have a shard of ``model``.

    All of them call this once. The first process has a :class:`~torch_pi2.base.calls.Leader` at once: whatever it does
    from now on with a :class:`Decoder` that it makes, with :func:`torch_pi2.generate`, ``model.generate`` or
    ``model(...)``, the others do, too. They return from this, with None, when the first one has closed its leader;
    until then they wait, for as long as the first one lives.

    ``model(...)`` takes numbers, text and tensors, but no cache of keys and values. Calls of all threads are made one
    after another. Budgets (:func:`torch_pi2.set_budget`), plans (:func:`torch_pi2.follow`) and statistics stay those
    of the process that asks.

    Raises:
        ConfigError: no other process has part of the model, or it is led already.
        GroupError: another process has ended, hangs, or has failed; in the others also that the first one has.
    """
    group = group_of(model)
    if group is None or group.led:
        raise ConfigError(
            "lead(model)",
            expected="a model of shards, which several processes compute, and that none of them leads",
            found="one that this process computes alone" if group is None else "one that is led",
            fix="Call it once, in all processes, after torch_pi2.load of a folder of shards.",
        )
    Ranks(together=True).each(None)  # loading may take some of them long
    if group.rank:
        _Follower(model).follow(group)
        return None
    leader = Leader(group)
    if not isinstance(model, _Told):
        model.__class__ = type(type(model).__name__, (_Told, type(model)), {})
    return leader


class _Told:
    """Before the class of a model among its bases: of its calls the other processes are told."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leader = leader_of(self)  # type: ignore[arg-type]
        if leader is None or (torch.compiler.is_compiling() and leader.within):  # the latter: a step of a Decoder
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        ids = kwargs.get("input_ids", next(iter(args), None))
        if isinstance(ids, torch.Tensor):  # before the others begin what would fail in the middle
            check_vocabulary(self, ids)  # type: ignore[arg-type]
        return _tell(leader, super().__call__, args, kwargs)  # type: ignore[misc]


@torch.compiler.disable(reason="the other processes are told of each call, and do not compile it")
def _tell(leader: Leader, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with leader.call(Call(_MODEL, None, args, kwargs, is_sparse_only())):
        return call(*args, **kwargs)


class _Follower:
    """Makes the calls of the first process with ``model`` and with Decoders of its own."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._decoders: dict[int, Decoder] = {}
        self._parts: dict[int, Part] = {}

    def follow(self, group: Group) -> None:
        """Until the first process has closed its leader. Raises GroupError."""
        try:
            follow(group, self._make, self._forget)
        finally:
            self._decoders.clear()
            self._parts.clear()

    def _forget(self, gone: Sequence[int]) -> None:
        for number in gone:
            self._decoders.pop(number, None)
            self._parts.pop(number, None)

    def _make(self, call: Call) -> None:
        with torch.no_grad(), sparse_only() if call.sparse else nullcontext():
            if call.of is None:
                self._model(*call.args, **call.kwargs)
            elif call.name == Decoder.__name__:
                self._decoders[call.of] = Decoder(self._model, **call.kwargs)
            elif call.name in LED:
                found = getattr(self._decoders[call.of], call.name)(*self._own(call.args), **call.kwargs)
                if isinstance(found, Part):
                    assert found.number is not None
                    self._parts[found.number] = found

    def _own(self, value: Any) -> Any:
        """``value`` with the parts of this process."""
        if isinstance(value, Part):
            assert value.number is not None
            return self._parts[value.number]
        return [self._own(one) for one in value] if isinstance(value, list) else value
