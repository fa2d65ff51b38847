"""Opens our folders in transformers: ``Pi2QuantizationConfig``, and ``Pi2Quantizer``, which calls our loader.

transformers creates the model without weights, reads files into it, and returns it. We empty the model before the
second step, so that nothing is read or initialised; then :func:`torch_pi2.load` reads the folder, and the model takes
over the attributes of the loaded one. :func:`register` also lets ``save_pretrained`` write such models as our folders.
"""

import copy
import functools
import inspect
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from transformers import PreTrainedModel
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from torch_pi2.base.dtypes import DTYPES
from torch_pi2.base.fields import Field, argument, checked
from torch_pi2.base.files import replacing_folder
from torch_pi2.base.modules import fresh_settings
from torch_pi2.base.tensorfile import TensorReader
from torch_pi2.checkpoint.save_load import current_state, finish_loading, read_model, save_parts
from torch_pi2.checkpoint.sparse import LoadSettings, save_weights, save_without_weights
from torch_pi2.errors import DeviceError, UnsupportedModelError, check_choice
from torch_pi2.formats import FLOATS
from torch_pi2.rewrite.gpu import checked_memory
from torch_pi2.rewrite.state import ModelState, store_of
from torch_pi2.store.folder import HF_FILE, HF_METHOD, PI2_FOLDER, check_separate, declare
from torch_pi2.store.storefile import STORE_FILE, weights_path
from torch_pi2.store.trust import remember
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

    def over(self, own: "Pi2QuantizationConfig") -> "Pi2QuantizationConfig":
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
        """Empty, because our ``save_pretrained`` writes the weights."""
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


#: Unsupported arguments of ``save_pretrained``, which would write other files or values.
_UNSUPPORTED = ("state_dict", "variant", "push_to_hub", "distributed_checkpoint")


def register() -> None:
    """Register the quantisation method and its settings, once per process, and wrap ``merge_quantization_configs``,
    which accepts settings only for classes in a fixed list, and ``save_pretrained``, which only writes state dicts.
    """
    if HF_METHOD in auto.AUTO_QUANTIZER_MAPPING:
        return
    auto.register_quantization_config(HF_METHOD)(Pi2QuantizationConfig)
    auto.register_quantizer(HF_METHOD)(Pi2Quantizer)
    merge: Any = staticmethod(_merging(auto.AutoHfQuantizer.merge_quantization_configs))
    auto.AutoHfQuantizer.merge_quantization_configs = merge
    PreTrainedModel.save_pretrained = _saving(PreTrainedModel.save_pretrained)


def _merging(usual: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(usual)
    def merge(quantization_config: Any, quantization_config_from_args: Any) -> Any:
        own, passed = quantization_config, quantization_config_from_args
        if isinstance(own, Mapping) and own.get("quant_method") == HF_METHOD:
            own = Pi2QuantizationConfig(**own)
        if not isinstance(own, Pi2QuantizationConfig) or passed is None:
            return usual(own, passed)
        if isinstance(passed, Mapping):
            passed = Pi2QuantizationConfig(**passed)
        if not isinstance(passed, Pi2QuantizationConfig):
            fix = "Leave it out, or quantise the float checkpoint."
            argument(passed, "from_pretrained(quantization_config=...)", fix).wrong(
                "a Pi2QuantizationConfig: the folder has its weights in torch_pi2's form", f"a {type(passed).__name__}"
            )
        return passed.over(own)

    return merge


def _saving(usual: Callable[..., Any]) -> Callable[..., Any]:
    """``save_pretrained`` that writes our models as our folders, and calls ``usual`` for others."""
    signature = inspect.signature(usual)

    @functools.wraps(usual)
    def save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        ours = isinstance(getattr(self, "hf_quantizer", None), Pi2Quantizer)
        if ours and ModelState.of(self) is None:  # restored to an ordinary model
            self.hf_quantizer.remove_quantization_config(self)
            ours = False
        given = signature.bind_partial(self, save_directory, *args, **kwargs).arguments
        if not ours or given.get("state_dict") == {}:  # {}: our own call
            return usual(self, save_directory, *args, **kwargs)
        for name in _UNSUPPORTED:
            if given.get(name):
                fix = "Use model.push_to_hub(name)." if name == "push_to_hub" else "Leave it out."
                expected = "a model with the weights that it was loaded with"
                argument(given, f"save_pretrained({name}=...)", fix).wrong(expected, "other files or values to write")
        if given.get("is_main_process", True):
            _write(self, Path(save_directory))
        return None

    return save_pretrained


def _write(model: Any, folder: Path) -> None:
    """Write ``pi2/`` and the configuration of ``model``; other files in ``folder`` stay, except dense weights. Raises
    ConfigError: ``model`` reads its store from that folder. ArtifactError: it cannot be written. StaleArtifactError:
    predictors or thresholds were fitted to other weights.
    """
    store = store_of(model)
    if store is None:
        parts = current_state(model)
    else:
        check_separate("save_pretrained", store.path.parent.parent, folder)
    folder.mkdir(parents=True, exist_ok=True)
    with replacing_folder(folder / PI2_FOLDER) as staging:
        if store is None:
            save_weights(model, parts.plan, staging)
            save_parts(parts, staging)
        else:
            for path in store.path.parent.iterdir():
                if path.is_file():
                    shutil.copyfile(path, staging / path.name)
    save_without_weights(model, folder)
    declare(folder)
    remember(folder)
