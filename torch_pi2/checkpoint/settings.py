"""The settings with which a folder is loaded, and what contradicts them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_pi2.base.dtypes import check_computed
from torch_pi2.base.fields import argument
from torch_pi2.base.units import parse_bytes
from torch_pi2.errors import ConfigError, check_choice
from torch_pi2.formats import ACTIVATIONS
from torch_pi2.store.storefile import STORE_FILE
from torch_pi2.types.offload import OffloadConfig
from torch_pi2.types.plan import Plan
from torch_pi2.types.shard import GroupConfig

#: Tokens that a budget has memory for, unless ``context`` says otherwise.
DEFAULT_CONTEXT = 1024


@dataclass(frozen=True)
class LoadSettings:
    """Arguments of :func:`torch_pi2.load`, which describes them.

    Attributes:
        config: a transformers configuration to build the model with, in place of the folder's.
    """

    model: nn.Module | None = None
    trust_remote_code: bool = False
    dtype: torch.dtype | None = None
    activations: str = "float"
    budget: float | str | None = None
    offload: OffloadConfig | None = None
    context: int | None = None
    strict_budget: bool = False
    plan: Plan | str | Path | None = None
    group: GroupConfig | None = None
    progress: bool = False
    config: Any = None

    def __post_init__(self) -> None:
        if self.context is not None:
            argument(self.context, "load(context=...)").whole(1, 1 << 31)
        if self.dtype is not None:
            check_computed("load(dtype=...)", self.dtype)

    @property
    def budget_bytes(self) -> int | None:
        """The budget; None: there is none. Raises ConfigError: no number of bytes."""
        return None if self.budget is None else parse_bytes(self.budget)

    @property
    def context_tokens(self) -> int:
        """Tokens that the budget has memory for."""
        return self.context or DEFAULT_CONTEXT

    @property
    def int8_activations(self) -> bool:
        return self.activations == "int8"

    def offload_with(self, plan: Plan) -> OffloadConfig:
        """How neurons are read and kept: as asked for, or as ``plan`` says."""
        return self.offload or offload_of(plan)

    def check_store(self, folder: Path, *, over_store: bool, is_shard: bool) -> None:
        """Raises ConfigError: a setting needs a budget, or a shard, and ``folder`` is loaded without."""
        needs_budget = {
            "offload": self.offload is not None,
            "strict_budget": self.strict_budget,
            "context": self.context is not None,
        }
        if any(needs_budget.values()) and not over_store:
            named = ", ".join(f"{name}=..." for name, given in needs_budget.items() if given)
            raise self._wrong(
                folder,
                named,
                "a budget with it",
                "none: all weights would be in memory",
                "Pass budget=..., for instance '2.5GiB'.",
            )
        if self.group is not None and not is_shard:
            raise self._wrong(
                folder,
                "group=...",
                "a shard",
                "a whole model, which each process computes alone",
                "Make shards (torch-pi2 pack --ranks N), or leave --reduction, --attention and --timeout out.",
            )

    def check_quantised(self, folder: Path) -> None:
        """Raises ConfigError: a setting that a folder with weights in ``pi2/`` cannot have."""
        if self.model is not None:
            raise self._wrong(
                folder,
                "model=...",
                "no model: a quantised one is built from its configuration",
                f"a {type(self.model).__name__}",
                "Leave model out, or use load_dense for the float weights.",
            )
        check_choice("load(activations=...)", self.activations, ACTIVATIONS, "Correct it.")

    def check_float(self, folder: Path) -> None:
        """Raises ConfigError: a setting that a folder with float weights cannot have."""
        if self.budget is not None:
            raise no_store(
                folder, "float weights", "Make one with torch_pi2.pack(folder, out), which changes no number."
            )
        if self.activations != "float":
            raise self._wrong(
                folder,
                "activations=...",
                "float, as the weights are float",
                repr(self.activations),
                "Quantise the folder first (torch_pi2.quantize).",
            )

    @staticmethod
    def _wrong(folder: Path, setting: str, expected: str, found: str, fix: str) -> ConfigError:
        return ConfigError(f"load({folder}, {setting})", expected=expected, found=found, fix=fix)


def no_store(folder: Path, found: str, fix: str) -> ConfigError:
    """A budget for a folder without a neuron store."""
    expected = f"a folder with a neuron store (pi2/{STORE_FILE})"
    return ConfigError(f"load({folder}, budget=...)", expected=expected, found=found, fix=fix)


def offload_of(plan: Plan) -> OffloadConfig:
    """What ``plan`` says of reading and keeping neurons. Raises ConfigError: it makes no sense."""
    return OffloadConfig() if plan.hardware is None else OffloadConfig(**plan.hardware.offload)
