"""Attention of which each process of a group has some heads (docs/DISTRIBUTED.md): what heads find is gathered.

As tensor parallelism has it (Megatron-LM, arXiv 1909.08053, section 3), by transformers' own plans for it, but for the
output projection: outputs of heads are gathered before it, and every process computes all of it. So sums are those of
one machine, where products summed by part would have other last bits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from torch_pi2.base.group import Group
from torch_pi2.errors import UnsupportedModelError
from torch_pi2.layers.linear import QuantLinear
from torch_pi2.layers.sharded import computed_together
from torch_pi2.types.shard import Shard, apportioned

#: What a plan says of attention that can be divided: rows of a head after another's, and columns.
_BY_ROWS = ("q_proj", "k_proj", "v_proj")
_PLAN = {**dict.fromkeys(_BY_ROWS, "colwise"), "o_proj": "rowwise"}
#: Of norms of one head, which are alike for all.
_ALIKE = "replicated_with_grad_allreduce"
_FIX = 'Leave attention whole: GroupConfig(attention="whole"), --attention whole.'


class Heads:
    """Which heads of a model's attention each process has: key-value heads, each with the query heads that ask it.

    As many as its share of the neurons, at least one each.

    Args:
        hf: the configuration of the model, of transformers. shards: of all processes, by rank.

    Attributes:
        all: how many there are. counts: by rank.

    Raises:
        UnsupportedModelError: attention is not of the kind that can be divided, or has fewer heads than processes.
    """

    def __init__(self, hf: Any, shards: Sequence[Shard], rank: int) -> None:
        config = hf.get_text_config()
        self._what = f"attention of {config.model_type} by heads"
        if shards[rank].by_layers:
            raise self._refused("shards of neurons", "stages, which have whole layers")
        self._parents = _divided(config)
        if not self._parents:
            raise self._refused(
                "a plan of tensor parallelism with q_proj, k_proj, v_proj and o_proj", "another, or none"
            )
        self.all = _key_value_heads(config)
        if self.all < len(shards):
            raise self._refused(f"a key-value head for each of {len(shards)} processes", str(self.all))
        mine = [sum(layer.neurons for layer in shard.layers.values()) / shard.whole for shard in shards]
        self.counts, self._rank, self._shard = apportioned(self.all, mine), rank, shards[rank]

    @property
    def share(self) -> float:
        """Of all heads, those that are here."""
        return self.counts[self._rank] / self.all

    def names(self, names: Iterable[str]) -> list[str]:
        """Of tensors or modules, those of projections of which some rows are here."""
        return [name for name in names if self._role(name) in _BY_ROWS]

    def _role(self, name: str) -> str | None:
        """Which projection of attention that is divided it is, or a tensor of."""
        if self._shard.block(name) is None:
            return None
        return next((match[1] for parent in self._parents if (match := parent.search(name))), None)

    def rows(self, model: nn.Module) -> dict[str, slice]:
        """Rows that are here, by the name of each parameter of ``model`` (without weights) that is divided.

        Raises:
            UnsupportedModelError: modules are not what the plan says.
        """
        before = sum(self.counts[: self._rank])
        found: dict[str, slice] = {}
        for parent in self._attention(model):
            module = model.get_submodule(parent)
            self._check(parent, module)
            for role in _BY_ROWS:
                linear: Any = getattr(module, role)
                each = linear.out_features // self.all  # of a key-value head, and of the queries that ask it
                here = slice(before * each, (before + self.counts[self._rank]) * each)
                found |= {f"{parent}.{role}.{name}": here for name, _ in linear.named_parameters()}
        if not found:
            raise self._refused("attention in the blocks of feed-forward layers", "none")
        return found

    def _attention(self, model: nn.Module) -> list[str]:
        """Names of modules."""
        names = (name for name, _ in model.named_modules() if self._role(name) == "o_proj")
        return [name.rpartition(".")[0] for name in names if name.endswith(".o_proj")]

    def _check(self, name: str, module: Any) -> None:
        if not has_heads(module, self.all):
            raise self._refused(
                f"{name} with {self.all} key-value heads, linear projections, and nothing else of each head",
                f"a {type(module).__name__}",
            )

    def _refused(self, expected: str, found: str) -> UnsupportedModelError:
        return UnsupportedModelError(self._what, expected=expected, found=found, fix=_FIX)

    def join(self, model: nn.Module, group: Group) -> None:
        """Attention of ``model``, of which the :meth:`rows` are in place, asks the others of ``group`` for theirs."""
        for parent in self._attention(model):
            module: Any = model.get_submodule(parent)
            for role in _BY_ROWS:
                linear = getattr(module, role)
                if isinstance(linear, nn.Linear):
                    linear.out_features = len(linear.weight)
            projection = module.o_proj
            width = projection.in_features // self.all
            projection.__class__ = type(
                type(projection).__name__,
                (_OfAllHeads, type(projection)),
                {"group": group, "widths": [count * width for count in self.counts]},
            )
        group.divides_kv = True


def heads_that_divide(hf: Any) -> int:
    """Key-value heads of a model with the configuration ``hf``; 0: its attention is not of the kind that
    :class:`Heads` divides.
    """
    config = hf.get_text_config()
    return _key_value_heads(config) if _divided(config) else 0


def _key_value_heads(config: Any) -> int:
    return getattr(config, "num_key_value_heads", None) or int(config.num_attention_heads)


def has_heads(module: Any, count: int) -> bool:
    """Whether attention ``module``, with a plan as above, has so many key-value heads, each of them of rows of linear
    projections and nothing else.
    """
    roles = {role: getattr(module, role, None) for role in _PLAN}  # layers that share keys have no k_proj
    if not all(type(linear) in (nn.Linear, QuantLinear) for linear in roles.values()):
        return False
    others = [tensor for tensor in module._parameters.values() if tensor is not None]
    others += [p for role, child in module.named_children() if role not in roles for p in child.parameters()]
    width = getattr(module, "head_dim", 0)
    sizes = [module.q_proj.out_features, module.o_proj.in_features]
    whole = {module.k_proj.out_features, module.v_proj.out_features} == {count * width}
    return whole and not any(size % count for size in sizes) and all(p.shape == (width,) for p in others)


def _divided(config: Any) -> list[re.Pattern[str]]:
    """Of attention modules with a plan by heads: finds the projection in the name of a tensor or module."""
    plan: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    by_parent: dict[str, dict[str, str]] = {}
    for name, way in plan.items():
        parent, _, role = name.rpartition(".")
        by_parent.setdefault(parent, {})[role] = way
    # a plan for the module itself is of parameters of its own, by head (sinks)
    found = [
        parent
        for parent, ways in by_parent.items()
        if ways.items() >= _PLAN.items()
        and parent not in plan
        and all(role in _PLAN or way == _ALIKE for role, way in ways.items())
    ]
    patterns = (re.escape(parent).replace(r"\*", r"\d+") for parent in found)
    return [re.compile(rf"(?:^|\.){pattern}\.([qkvo]_proj)(?:\.\w+)?$") for pattern in patterns]


class _OfAllHeads:
    """Before the class of an output projection among its bases: its input is gathered of all processes."""

    group: Group
    #: What heads find for a token, numbers by rank.
    widths: list[int]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(computed_together(self.group, self._gathered, x))  # type: ignore[misc]
        return y

    def _gathered(self, x: torch.Tensor) -> torch.Tensor:
        most = max(self.widths)
        own_1TW = x.reshape(1, -1, x.shape[-1])
        if x.shape[-1] < most:
            own_1TW = torch.cat([own_1TW, own_1TW.new_zeros(1, own_1TW.shape[1], most - x.shape[-1])], -1)
        parts_RTW = self.group.gather(own_1TW)
        found = torch.cat([part_TW[:, :width] for part_TW, width in zip(parts_RTW, self.widths, strict=True)], -1)
        return found.reshape(*x.shape[:-1], -1)
