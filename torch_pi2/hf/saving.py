"""``save_pretrained`` of a model that transformers opened by us: a folder like the one that it is of."""

from __future__ import annotations

import functools
import inspect
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch_pi2.base.files import replacing_folder
from torch_pi2.checkpoint.save_load import current_state, save_parts, save_without_weights
from torch_pi2.checkpoint.sparse import save_weights
from torch_pi2.errors import ConfigError
from torch_pi2.hf.quantizer import Pi2Quantizer
from torch_pi2.rewrite.handle import Handle, store_of
from torch_pi2.store.folder import PI2_FOLDER, check_separate, declare
from torch_pi2.store.trust import remember

#: Of ``save_pretrained``: what would have another file written, or other values.
_NOT_OURS = ("state_dict", "variant", "push_to_hub", "distributed_checkpoint")


def saving(usual: Callable[..., Any]) -> Callable[..., Any]:
    """``usual``, the ``save_pretrained`` of transformers, which leaves models of ours to us."""

    signature = inspect.signature(usual)

    @functools.wraps(usual)
    def save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        ours = isinstance(getattr(self, "hf_quantizer", None), Pi2Quantizer)
        if ours and Handle.of(self) is None:  # restored: an ordinary model again
            self.hf_quantizer.remove_quantization_config(self)
            ours = False
        given = signature.bind_partial(self, save_directory, *args, **kwargs).arguments
        if not ours or given.get("state_dict") == {}:  # {}: what we ask for ourselves
            return usual(self, save_directory, *args, **kwargs)
        for name in _NOT_OURS:
            if given.get(name):
                raise ConfigError(
                    f"save_pretrained({name}=...)",
                    expected="a model with the weights that it was loaded with",
                    found="other files or values to write",
                    fix="Use model.push_to_hub(name)." if name == "push_to_hub" else "Leave it out.",
                )
        if given.get("is_main_process", True):
            _write(self, Path(save_directory))
        return None

    return save_pretrained


def _write(model: Any, folder: Path) -> None:
    """``pi2/`` and configuration of ``model``; other files in ``folder`` stay, but for dense weights.

    Raises:
        ConfigError: it is the folder of the store that ``model`` reads. ArtifactError: it cannot be written.
        StaleArtifactError: predictors or thresholds were fitted to other weights.
    """
    store = store_of(model)
    if store is None:
        parts = current_state(model)
    else:
        check_separate("save_pretrained", store.path.parent.parent, folder)
    folder.mkdir(parents=True, exist_ok=True)
    with replacing_folder(folder / PI2_FOLDER) as staging:
        if store is None:
            save_parts(replace(parts, plan=save_weights(model, parts.plan, staging)), staging)
        else:
            for path in store.path.parent.iterdir():
                if path.is_file():
                    shutil.copyfile(path, staging / path.name)
    save_without_weights(model, folder)
    declare(folder)
    remember(folder)
