"""``identity``: a hash of all that decides the bits of keys and values, so that none of anything else are used."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torch_pi2
from torch_pi2.base.absent import AbsentParameter
from torch_pi2.base.process import describe
from torch_pi2.base.tensorfile import Spec
from torch_pi2.decode.pieces import pieces_without_loss
from torch_pi2.layers.gpu import device_of
from torch_pi2.layers.of_model import homes
from torch_pi2.layers.sharded import Share
from torch_pi2.ops.library import library_path
from torch_pi2.rewrite.handle import store_of
from torch_pi2.store.storefile import StoreReader, block_checks

#: Of whose modules the version says enough.
_VERSIONED = ("torch", "transformers")
#: Where a model is from, which changes nothing, and what of it is on a GPU, which is said by itself.
_PLACES = ("name_or_path", "_name_or_path", "split")


def identity(model: nn.Module) -> str:
    """SHA-256, 64 hexadecimal digits: equal where ``model`` computes the same keys and values of the same tokens.

    Of its weights (those in memory by checksums of 4 KiB each; of a store by those that it has of its neurons), how it
    is built and set (dtypes, sizes, activations, methods, thresholds), the bytes of this package and of modelling code
    that came with the model, versions of torch and transformers, the processor's instructions, and the GPU. Where
    products are PyTorch's, also how many threads share them. Rather too much than too little: what it is too careful
    about is computed once more.
    """
    found = hashlib.sha256()
    for part in _parts(model):
        found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()


def _parts(model: nn.Module) -> Iterator[bytes]:
    yield json.dumps(_surroundings(model), sort_keys=True).encode()
    yield from sorted(hashlib.sha256(path.read_bytes()).digest() for path in _sources(model))
    config: Any = getattr(model, "config", None)
    if config is not None:
        said = {key: value for key, value in config.to_dict().items() if key not in _PLACES}
        said["_attn_implementation"] = config._attn_implementation
        yield json.dumps(said, sort_keys=True, default=str).encode()
    for name, module in model.named_modules():
        settings = {key: value for key, value in vars(module).items() if _plain(value) and key not in _PLACES}
        yield json.dumps([name, type(module).__qualname__, settings], sort_keys=True, default=str).encode()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not isinstance(tensor, AbsentParameter) and not tensor.is_meta:
            yield f"{name} {Spec.of(tensor)}".encode()
            yield block_checks(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)).numpy().tobytes()
    for home in homes(model):
        if home.split is not None:
            there = home.split.n_gpu
            yield json.dumps([home.site.key, there]).encode()
    for part in model.modules():
        share = getattr(part, "share", None)
        if isinstance(share, Share):  # of a layer whose sums are added in another order, or of others
            yield json.dumps([share.by_chunk_below, share.order]).encode()
    store = store_of(model)
    if store is not None:
        yield f"miss_margin {store.config.miss_margin} drop_experts {store.config.drop_experts}".encode()
        with StoreReader(store.path) as file:
            yield json.dumps(file.metadata, sort_keys=True).encode()
            for key in file.keys:
                yield file.read(f"{key}.checks").numpy().tobytes()


def _surroundings(model: nn.Module) -> dict[str, Any]:
    about = describe()
    threads = 0 if pieces_without_loss(model) else torch.get_num_threads()
    torch_has = [torch.backends.cpu.get_cpu_capability(), torch.get_float32_matmul_precision()]
    cpu = [about["machine"][name] for name in ("cpu", "kernels")]
    device = device_of(model)
    gpu = "" if device.type == "cpu" else torch.cuda.get_device_name(device)
    return {"cpu": cpu, "gpu": gpu, "versions": about["versions"], "torch": torch_has, "threads": threads}


def _sources(model: nn.Module) -> set[Path]:
    """Files of this package, and those with the classes of ``model`` that have no version of ours to go by."""
    ours = Path(torch_pi2.__file__).parent
    found = {path for kind in ("*.py", "*.so") for path in ours.rglob(kind)}
    found.add(library_path())
    for module in {type(module).__module__ for module in model.modules()}:
        if module.partition(".")[0] not in _VERSIONED:
            file = getattr(sys.modules.get(module), "__file__", None)
            found |= set() if file is None else {Path(file)}
    return found


def _plain(value: object) -> bool:
    """Whether it is a setting: a number, a text, a dtype, or several of these."""
    if isinstance(value, (list, tuple)):
        return all(map(_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype))
