"""Opens our folders in transformers: ``Pi2QuantizationConfig``, and ``Pi2Quantizer``, which calls our loader.

transformers creates the model without weights, reads files into it, and returns it. We empty the model before the
second step, so that nothing is read or initialised; then :func:`torch_pi2.load` reads the folder, and the model takes
over the attributes of the loaded one.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from torch_pi2.base.dtypes import DTYPES
from torch_pi2.base.fields import Field, checked
from torch_pi2.base.modules import fresh_settings
from torch_pi2.base.tensorfile import TensorReader
from torch_pi2.checkpoint.save_load import finish_loading, read_model
from torch_pi2.checkpoint.sparse import LoadSettings
from torch_pi2.errors import DeviceError, UnsupportedModelError, check_choice
from torch_pi2.formats import FLOATS
from torch_pi2.rewrite.gpu import checked_memory
from torch_pi2.store.folder import HF_FILE, HF_METHOD, PI2_FOLDER
from torch_pi2.store.storefile import STORE_FILE, weights_path
from torch_pi2.store.weights import WEIGHTS_FILE
from torch_pi2.types.offload import OffloadConfig
from torch_pi2.types.plan import Plan

#: Attributes set by transformers that the emptied model keeps.
_KEPT_ATTRIBUTES = ("generation_config", "generate", "is_quantized", "quantization_method", "hf_quantizer")
#: Accepted device maps; ``gpu_memory`` decides placement on a GPU.
_ANY_DEVICE = ("auto", "balanced", "balanced_low_0", "sequential")


class Pi2QuantizationConfig(QuantizationConfigMixin):
    """Settings of :func:`torch_pi2.load`, to be passed as ``quantization_config``.

    A dict works too, and so does ``quantization_config`` in a folder's config.json, for programs that pass nothing
    (``transformers serve``); passed settings take precedence. A folder of float weights opens as the dense model unless
    a setting is passed.

    Args:
        activations, budget, offload, context, plan, gpu_memory, progress: of :func:`torch_pi2.load`; ``offload`` may be
            a mapping of fields of :class:`torch_pi2.OffloadConfig`.
        quant_method, weights, dtype: written into config.json (docs/FORMATS.md); not to be passed.

    Raises:
        ConfigError: an unknown setting, or one of the wrong type.
    """

    @checked
    def __init__(
        self,
        *,
        activations: str | None = None,
        budget: float | str | None = None,
        offload: OffloadConfig | Mapping[str, Any] | None = None,
        context: int | None = None,
        plan: Plan | str | Path | None = None,
        gpu_memory: float | str | None = None,
        progress: bool | None = None,
        quant_method: str = HF_METHOD,
        weights: str | None = None,
        dtype: str | None = None,
    ) -> None:
        if dtype is not None:
            check_choice("Pi2QuantizationConfig(dtype=...)", dtype, FLOATS, "Make the folder again.")
        self.quant_method: Any = HF_METHOD
        self.weights, self.dtype = weights, dtype
        self.activations, self.budget, self.context = activations, budget, context
        self.offload = OffloadConfig(**offload) if isinstance(offload, Mapping) else offload
        self.plan, self.gpu_memory, self.progress = plan, gpu_memory, progress

    def to_dict(self) -> dict[str, Any]:
        """For config.json: properties of the folder, without settings for opening it."""
        values = {"quant_method": HF_METHOD, "weights": self.weights, "dtype": self.dtype}
        return {name: value for name, value in values.items() if value is not None}

    def settings(self) -> dict[str, Any]:
        """The given settings of :func:`torch_pi2.load`."""
        named = {name: value for name, value in vars(self).items() if value is not None}
        return {name: value for name, value in named.items() if name not in ("quant_method", "weights", "dtype")}

    def over(self, own: Pi2QuantizationConfig) -> Pi2QuantizationConfig:
        """These settings, with defaults from the folder's ``own``."""
        return Pi2QuantizationConfig(**own.settings() | self.settings(), weights=own.weights, dtype=own.dtype)


class Pi2Quantizer(HfQuantizer):
    """One call of ``from_pretrained`` for one of our folders.

    Raises as :func:`torch_pi2.load`; ConfigError or DeviceError for unsupported arguments; UnsupportedModelError for
    another class than the folder's.
    """

    quantization_config: Pi2QuantizationConfig

    def update_device_map(self, device_map: Any) -> None:
        for place in device_map.values() if isinstance(device_map, Mapping) else [device_map]:
            if place is not None and place not in _ANY_DEVICE and not str(place).startswith("cpu"):
                fix = "Leave it out; Pi2QuantizationConfig(gpu_memory=...) puts neurons on a GPU."
                Field(place, "from_pretrained(device_map=...)", fix, DeviceError).wrong("cpu or auto", str(place))

    def update_attn_implementation(self, config: Any) -> Any:
        """The first hook that gets ``config``, before files are searched: set the file to read."""
        own = self.quantization_config
        if own.weights is not None:  # weights in our format, by config.json
            config.transformers_weights = HF_FILE
            if config.dtype is None and own.dtype is not None:
                config.dtype = DTYPES[own.dtype]
        return config

    #: Older versions of transformers call this hook instead.
    update_tp_plan = update_attn_implementation

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        file = Path(kwargs["checkpoint_files"][0])
        self._folder = file.parent
        vars(model.config).pop("transformers_weights", None)
        wanted = (getattr(model.config, "architectures", None) or [type(model).__name__])[0]
        if type(model).__name__ != wanted:
            # not a ValueError: a pipeline would catch it, try the folder's class, and take logits for features
            fix = "Use AutoModelForCausalLM; its model.model is the model without the last layer."
            expected, found = f"a {wanted}, which its plan was made for", f"a {type(model).__name__}"
            Field(model, f"opening {self._folder}", fix, UnsupportedModelError).wrong(expected, found)
        if not Path(model.name_or_path).is_dir():
            _fetch(model.name_or_path, self._folder)
        if self.quantization_config.weights is not None:
            TensorReader(file).close()  # raises if it is missing or damaged
            if weights_path(self._folder / PI2_FOLDER) is None:
                Field(
                    self._folder, str(self._folder / PI2_FOLDER), "Copy the folder again, whole, or make it again."
                ).wrong(f"{STORE_FILE} or {WEIGHTS_FILE}", "neither")
        _empty(model)
        return model

    @fresh_settings()
    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        settings = self.quantization_config.settings()
        gpu_memory = settings.pop("gpu_memory", None)
        gpu_bytes = None if gpu_memory is None else checked_memory(gpu_memory)
        config = copy.deepcopy(model.config)
        del config.quantization_config
        allowed = type(model).__module__.startswith("transformers_modules")  # code of the folder that runs already
        how = LoadSettings(config=config, trust_remote_code=allowed, **settings)
        loaded: Any = read_model(self._folder, how)
        kept = {name: vars(model)[name] for name in _KEPT_ATTRIBUTES if name in vars(model)}
        vars(model).clear()
        vars(model).update(vars(loaded) | kept)
        model.config.quantization_config = self.quantization_config
        return finish_loading(model, gpu_bytes)

    def is_serializable(self) -> bool:
        return True

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Any], dict[str, str]]:
        """Empty, because :mod:`torch_pi2.hf.register` writes the weights."""
        return {}, {}

    @property
    def is_trainable(self) -> bool:
        return False


def _fetch(name: str, folder: Path) -> None:
    """Download ``pi2/`` of the Hub's model ``name`` into ``folder``, where transformers has stored the other files."""
    if weights_path(folder / PI2_FOLDER) is not None:
        return
    how: dict[str, Any] = {"revision": folder.name, "cache_dir": folder.parents[2]}
    weights = [f"{PI2_FOLDER}/{file}" for file in (WEIGHTS_FILE, STORE_FILE)]
    snapshot_download(name, allow_patterns=[f"{PI2_FOLDER}/*"], ignore_patterns=weights, **how)
    snapshot_download(name, allow_patterns=weights, **how)  # last: they mark the folder as complete


def _empty(model: Any) -> None:
    """Remove all tensors from ``model``, and transformers' records of them."""
    ignored = model._keys_to_ignore_on_load_unexpected  # a set, in older versions a list or missing
    vars(model).update(_modules={}, _parameters={}, _buffers={}, all_tied_weights_keys={}, _tp_plan={})
    vars(model).update(_keys_to_ignore_on_load_unexpected={".*"} if isinstance(ignored, set) else [".*"])
    vars(model).update(_is_hf_initialized=True)
