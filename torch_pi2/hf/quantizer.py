"""What transformers calls when it opens a folder of ours: our loader in the place of its own.

transformers makes the model without weights, reads files into it, and hands it over. Between the first and the last of
these the model is emptied, so that there is nothing to read or to initialise; then :func:`torch_pi2.load` reads the
folder, and the model becomes what that made.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers.quantizers.base import HfQuantizer

from torch_pi2.base.dtypes import DTYPES
from torch_pi2.base.evaluating import fresh_settings
from torch_pi2.base.tensorfile import TensorReader
from torch_pi2.checkpoint.save_load import finish_loading, read_model
from torch_pi2.checkpoint.settings import LoadSettings
from torch_pi2.errors import ArtifactError, ConfigError, DeviceError, UnsupportedModelError
from torch_pi2.hf.settings import Pi2QuantizationConfig
from torch_pi2.rewrite.gpu import checked_memory
from torch_pi2.store.folder import HF_FILE, PI2_FOLDER
from torch_pi2.store.storefile import STORE_FILE, weights_path
from torch_pi2.store.weights import WEIGHTS_FILE

#: Of the emptied model, and to be kept: what transformers has set meanwhile.
_THEIRS = ("generation_config", "generate", "is_quantized", "quantization_method", "hf_quantizer")
#: Where the computing is decided by ``gpu_memory``, not by a map of modules.
_ANYWHERE = ("auto", "balanced", "balanced_low_0", "sequential")


class Pi2Quantizer(HfQuantizer):
    """One use of ``from_pretrained`` for a folder of ours.

    Raises: as :func:`torch_pi2.load`; ConfigError or DeviceError for arguments that cannot be heeded;
        UnsupportedModelError for another class than the folder's.
    """

    quantization_config: Pi2QuantizationConfig

    def update_device_map(self, device_map: Any) -> None:
        places = device_map.values() if isinstance(device_map, Mapping) else [device_map]
        for place in places:
            if place is None or place in _ANYWHERE or (isinstance(place, str | torch.device) and _is_cpu(place)):
                continue
            raise DeviceError(
                "from_pretrained(device_map=...)",
                expected="cpu or auto",
                found=str(place),
                fix="Leave it out; quantization_config=Pi2QuantizationConfig(gpu_memory=...) puts neurons on a GPU.",
            )

    def update_attn_implementation(self, config: Any) -> Any:
        """The first hook that sees ``config``, before files are looked for: say which one to read."""
        own = self.quantization_config
        if getattr(config, "distributed_config", None) is not None:
            raise ConfigError(
                "from_pretrained(distributed_config=...)",
                expected="one process",
                found="a part of the model for each of several",
                fix="Leave distributed_config, tp_plan and tp_size out.",
            )
        if own.weights is not None:  # of a folder that says that its weights are ours
            config.transformers_weights = HF_FILE
            if config.dtype is None and own.dtype is not None:
                config.dtype = DTYPES[own.dtype]
        return config

    #: Its name in transformers before there was that hook.
    update_tp_plan = update_attn_implementation

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if kwargs.get("use_kernels"):
            raise ConfigError(
                "from_pretrained(use_kernels=True)",
                expected="layers that are computed by torch_pi2",
                found="kernels to take their place",
                fix="Leave it out.",
            )
        file = Path(kwargs["checkpoint_files"][0])
        self._folder = file.parent
        vars(model.config).pop("transformers_weights", None)
        _check_class(model, self._folder)
        if not Path(model.name_or_path).is_dir():
            _fetch(model.name_or_path, self._folder)
        if self.quantization_config.weights is not None:
            _check_there(file)
        _empty(model)
        return model

    @fresh_settings()
    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        settings = self.quantization_config.settings()
        gpu_memory = settings.pop("gpu_memory", None)
        gpu_bytes = None if gpu_memory is None else checked_memory(gpu_memory)
        config = copy.deepcopy(model.config)
        del config.quantization_config
        how = LoadSettings(config=config, trust_remote_code=_is_remote(model), **settings)
        made: Any = read_model(self._folder, how)
        if type(made) is not type(model):
            raise _other_class(type(made).__name__, model, self._folder)
        theirs = {name: vars(model)[name] for name in _THEIRS if name in vars(model)}
        vars(model).clear()
        vars(model).update(vars(made) | theirs)
        model.config.quantization_config = self.quantization_config
        return finish_loading(model, gpu_bytes)

    def is_serializable(self) -> bool:
        return True

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Any], dict[str, str]]:
        """Nothing: :mod:`torch_pi2.hf.saving` writes what is not configuration."""
        return {}, {}

    @property
    def is_trainable(self) -> bool:
        return False


def _is_cpu(place: str | torch.device) -> bool:
    return torch.device(place).type == "cpu" if place != "disk" else False


def _is_remote(model: Any) -> bool:
    """Whether the code of its class came with the folder, which the user has said may run."""
    return type(model).__module__.startswith("transformers_modules")


def _check_class(model: Any, folder: Path) -> None:
    """Raises UnsupportedModelError: the folder is of another class."""
    wanted = (getattr(model.config, "architectures", None) or [type(model).__name__])[0]
    if type(model).__name__ != wanted:
        raise _other_class(wanted, model, folder)


def _other_class(wanted: str, model: Any, folder: Path) -> UnsupportedModelError:
    """No ValueError: a pipeline of another task would go on to the folder's class, and take logits for features."""
    return UnsupportedModelError(
        f"opening {folder}",
        expected=f"a {wanted}, which its plan was made for",
        found=f"a {type(model).__name__}",
        fix="Use AutoModelForCausalLM, and of what it gives model.model where the last layer is not wanted.",
    )


def _check_there(file: Path) -> None:
    """Raises ArtifactError: the folder has not what its config.json says."""
    with TensorReader(file) as reader:
        tensors = len(reader.specs)
    pi2 = file.parent / PI2_FOLDER
    if tensors:
        path, expected, found = file, "a file of no tensors", f"{tensors}"
    elif weights_path(pi2) is None:
        path, expected, found = pi2, f"{STORE_FILE} or {WEIGHTS_FILE}", "neither" if pi2.exists() else "nothing"
    else:
        return
    raise ArtifactError(
        str(path), expected=expected, found=found, fix="Copy the folder again, whole, or make it again."
    )


def _fetch(name: str, folder: Path) -> None:
    """What is in ``pi2/`` on the Hub, of whose model ``name`` transformers has put other files into ``folder``."""
    if weights_path(folder / PI2_FOLDER) is not None:
        return
    how: dict[str, Any] = {"revision": folder.name, "cache_dir": folder.parents[2]}
    weights = [f"{PI2_FOLDER}/{file}" for file in (WEIGHTS_FILE, STORE_FILE)]
    snapshot_download(name, allow_patterns=[f"{PI2_FOLDER}/*"], ignore_patterns=weights, **how)
    snapshot_download(name, allow_patterns=weights, **how)  # last: where they are, all is


def _empty(model: Any) -> None:
    """Leave ``model`` no tensor, nor anything of transformers that knows of one."""
    ignored = model._keys_to_ignore_on_load_unexpected  # a set, or in older ones a list or nothing
    vars(model).update(_modules={}, _parameters={}, _buffers={}, all_tied_weights_keys={}, _tp_plan={})
    vars(model).update(_keys_to_ignore_on_load_unexpected={".*"} if isinstance(ignored, set) else [".*"])
    vars(model).update(_is_hf_initialized=True)
