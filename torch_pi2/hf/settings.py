"""``Pi2QuantizationConfig``: how transformers opens one of our folders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from torch_pi2.base.fields import checked
from torch_pi2.errors import ConfigError, check_choice
from torch_pi2.formats import FLOATS, OF_NEURONS
from torch_pi2.store.folder import HF_METHOD
from torch_pi2.types.offload import OffloadConfig
from torch_pi2.types.plan import Plan


class Pi2QuantizationConfig(QuantizationConfigMixin):
    """Settings of :func:`torch_pi2.load`, to be passed as ``quantization_config``.

    A dict works as well, and so does ``quantization_config`` in a folder's config.json, for programs that pass nothing
    (``transformers serve``); what is passed takes precedence. A folder of float weights opens as the dense model
    unless a setting is passed.

    Args:
        activations, budget, offload, context, strict_budget, plan, gpu_memory, progress: of :func:`torch_pi2.load`;
            ``offload`` may be a mapping of the fields of an :class:`torch_pi2.OffloadConfig`.
        quant_method, weights, dtype: written into config.json (docs/FORMATS.md); not to be passed.

    Raises:
        ConfigError: there is no such setting, or it is of another type.
    """

    @checked
    def __init__(
        self,
        *,
        activations: str | None = None,
        budget: float | str | None = None,
        offload: OffloadConfig | Mapping[str, Any] | None = None,
        context: int | None = None,
        strict_budget: bool | None = None,
        plan: Plan | str | Path | None = None,
        gpu_memory: float | str | None = None,
        progress: bool | None = None,
        quant_method: str = HF_METHOD,
        weights: str | None = None,
        dtype: str | None = None,
    ) -> None:
        if quant_method != HF_METHOD:
            raise ConfigError(
                "Pi2QuantizationConfig(quant_method=...)", expected=HF_METHOD, found=quant_method, fix="Leave it out."
            )
        if weights is not None:
            check_choice("Pi2QuantizationConfig(weights=...)", weights, OF_NEURONS, "Make the folder again.")
        if dtype is not None:
            check_choice("Pi2QuantizationConfig(dtype=...)", dtype, FLOATS, "Make the folder again.")
        self.quant_method: Any = HF_METHOD
        self.weights, self.dtype = weights, dtype
        self.activations, self.budget, self.context, self.strict_budget = activations, budget, context, strict_budget
        self.offload = OffloadConfig(**offload) if isinstance(offload, Mapping) else offload
        self.plan, self.gpu_memory, self.progress = plan, gpu_memory, progress

    def to_dict(self) -> dict[str, Any]:
        """For config.json: what is true of the folder on any machine, without how to open it."""
        values = {"quant_method": HF_METHOD, "weights": self.weights, "dtype": self.dtype}
        return {name: value for name, value in values.items() if value is not None}

    def settings(self) -> dict[str, Any]:
        """The settings of :func:`torch_pi2.load` that were given."""
        named = {name: value for name, value in vars(self).items() if value is not None}
        return {name: value for name, value in named.items() if name not in ("quant_method", "weights", "dtype")}

    def over(self, own: Pi2QuantizationConfig) -> Pi2QuantizationConfig:
        """These settings, and those of the folder's ``own`` that are not given here."""
        return Pi2QuantizationConfig(**own.settings() | self.settings(), weights=own.weights, dtype=own.dtype)
