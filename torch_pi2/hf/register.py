"""Registration with transformers, and ``save_pretrained`` for models that were opened from our folders."""

import functools
import inspect
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.quantizers.auto import (
    AUTO_QUANTIZER_MAPPING,
    AutoHfQuantizer,
    register_quantization_config,
    register_quantizer,
)

from torch_pi2.base.fields import argument
from torch_pi2.base.files import replacing_folder
from torch_pi2.checkpoint.save_load import current_state, save_parts
from torch_pi2.checkpoint.sparse import save_weights, save_without_weights
from torch_pi2.hf.quantizer import Pi2QuantizationConfig, Pi2Quantizer
from torch_pi2.rewrite.state import ModelState, store_of
from torch_pi2.store.folder import HF_METHOD, PI2_FOLDER, check_separate, declare
from torch_pi2.store.trust import remember

#: Unsupported arguments of ``save_pretrained``, which would write other files or values.
_UNSUPPORTED = ("state_dict", "variant", "push_to_hub", "distributed_checkpoint")


def register() -> None:
    """Register the quantisation method and its settings, once per process, and wrap ``merge_quantization_configs``,
    which accepts settings only for classes in a fixed list, and ``save_pretrained``, which only writes state dicts.
    """
    if HF_METHOD in AUTO_QUANTIZER_MAPPING:
        return
    register_quantization_config(HF_METHOD)(Pi2QuantizationConfig)
    register_quantizer(HF_METHOD)(Pi2Quantizer)
    merge: Any = staticmethod(_merging(AutoHfQuantizer.merge_quantization_configs))
    AutoHfQuantizer.merge_quantization_configs = merge
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
