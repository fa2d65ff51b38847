"""GPTQ of a checkpoint on disk: the model runs with only the weights of the module that is being called in memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from torch_pi2.base.files import not_written
from torch_pi2.checkpoint.placing import Stored, refs_of
from torch_pi2.errors import UnsupportedModelError
from torch_pi2.fitting.gptq_model import calibrated_rows, warn_rounded
from torch_pi2.graph.routed import modules_of
from torch_pi2.profiling.data import Batch
from torch_pi2.rewrite.skeleton import put
from torch_pi2.types.site import FFNSite


class RowFiles(dict[str, torch.Tensor]):
    """Rows in temporary files in ``folder``, mapped: the system reads them again when they are used."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def keep(self, key: str, rows: torch.Tensor) -> None:
        """Raises ArtifactError: it cannot be written."""
        try:
            with tempfile.NamedTemporaryFile(dir=self._folder) as file:
                rows.numpy().tofile(file)
                file.flush()
                os.fsync(file.fileno())
                mapped = torch.from_file(file.name, shared=False, size=rows.numel(), dtype=torch.uint8)
        except OSError as error:
            raise not_written(self._folder, error) from error
        self[key] = mapped.view(rows.shape)


def rows_of_checkpoint(
    stored: Stored,
    data: Sequence[Batch],
    sites: Sequence[FFNSite],
    linears: Collection[str],
    weights: str,
    folder: Path,
    *,
    progress: bool = False,
) -> RowFiles:
    """See :func:`torch_pi2.fitting.gptq_model.calibrated_rows`, of the skeleton in ``stored``. Files are in ``folder``.

    Raises:
        UnsupportedModelError: a module's code reads weights of another one.
    """
    found = RowFiles(folder)
    with _streamed(stored, sites):
        rounded = calibrated_rows(stored.model, data, sites, linears, weights, found.keep, progress=progress)
    warn_rounded(rounded)
    return found


class _OwnWeights(TorchFunctionMode):
    """Refuses to compute with ``absent`` tensors, the weights of modules that are not being called."""

    def __init__(self, absent: Mapping[str, torch.Tensor], where: str) -> None:
        super().__init__()
        self._names, self._where = {id(tensor): name for name, tensor in absent.items()}, where

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        read = [self._names[id(value)] for value in args if id(value) in self._names]
        try:
            made = func(*args, **(kwargs or {}))
        except RuntimeError as error:  # of functions that refuse meta tensors; others return garbage
            if read:
                raise self._refused(read[0]) from error
            raise
        if read and isinstance(made, torch.Tensor):  # not a shape or dtype
            raise self._refused(read[0])
        return made

    def _refused(self, name: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            self._where,
            expected="modules that compute with their own weights",
            found=f"another that reads {name}",
            fix="Load it, and use torch_pi2.optimize(model, text, weights=..., quantization='gptq').",
        )


@contextmanager
def _streamed(stored: Stored, sites: Sequence[FFNSite]) -> Iterator[None]:
    """Modules of the skeleton have their weights while they are called."""
    model, checkpoint = stored.model, stored.checkpoint
    experts = modules_of(sites)
    hooks: list[Any] = []
    before: dict[str, Any] = {}
    absent: dict[str, Any] = {}

    def read(names: Collection[str], name: str) -> Any:
        def hook(*_: Any) -> None:
            for parameter in names:
                now = before[parameter]
                if name in experts and stored.name(parameter) not in checkpoint:
                    value = torch.empty(now.shape, dtype=now.dtype)
                else:
                    value = checkpoint.read(stored.name(parameter)).to(now.dtype)
                put(model, [parameter], value)
            for site in experts.get(name, ()):
                for role, ref in refs_of(site):
                    if stored.name(ref.weight) not in checkpoint:
                        stored.read_expert(site, role, ref)

        return hook

    def leave(names: Collection[str]) -> Any:
        def hook(*_: Any) -> None:
            for parameter in names:
                put_back(parameter, absent[parameter])

        return hook

    def put_back(parameter: str, was: Any) -> None:
        """Put the same object back, so that tied parameters are tied again."""
        owner_name, _, local = parameter.rpartition(".")
        owner: Any = model.get_submodule(owner_name)
        (owner._buffers if local in owner._buffers else owner._parameters)[local] = was

    for name, module in model.named_modules():
        own = {f"{name}.{local}" if name else local: tensor for local, tensor in _own(module)}
        own = {parameter: tensor for parameter, tensor in own.items() if parameter in stored.alias}
        if own:
            before |= own
            hooks += [module.register_forward_pre_hook(read(own, name)), module.register_forward_hook(leave(own))]
    for parameter, tensor in before.items():
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        absent[parameter] = nn.Parameter(empty, False) if isinstance(tensor, nn.Parameter) else empty
        put_back(parameter, absent[parameter])
    try:
        with _OwnWeights(absent, f"running {type(model).__name__} from {checkpoint.folder}"):
            yield
    finally:
        for hook in hooks:
            hook.remove()
        for parameter, tensor in before.items():
            put_back(parameter, tensor)


def _own(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)
