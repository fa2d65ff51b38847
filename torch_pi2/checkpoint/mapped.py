"""A model whose weights stay in the files of its checkpoint, to be profiled and fitted in little memory."""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from pathlib import Path

import torch
from torch import nn

from torch_pi2.base.dtypes import dtype_name
from torch_pi2.base.fields import checked
from torch_pi2.base.files import not_written
from torch_pi2.base.memory import MappedFile, set_mapped
from torch_pi2.base.progress import bar
from torch_pi2.base.tensorfile import Spec
from torch_pi2.checkpoint.placing import Stored, refs_of
from torch_pi2.errors import DtypeError
from torch_pi2.graph.find import search
from torch_pi2.rewrite.skeleton import check_filled, fill, on_meta, put, skeleton
from torch_pi2.store.folder import check_float, read_config
from torch_pi2.store.source import Checkpoint, wrong_shape
from torch_pi2.types.site import FFNSite, LinearRef

#: Smaller tensors are read into memory, and converted if the model computes in another dtype.
_SMALL_BYTES = 1 << 20


@checked
def load_mapped(
    folder: str | Path, *, scratch: str | Path | None = None, trust_remote_code: bool = False, progress: bool = False
) -> nn.Module:
    """The dense model of a float checkpoint, in evaluation mode, with weights in mapped files.

    In :func:`torch_pi2.profile` and :func:`torch_pi2.fit` a module's weights take memory only while it is called. The
    dtype is that of the configuration.

    Args:
        scratch: folder for temporary files, into which the experts of a layer are stacked if the checkpoint has them
            one by one (default: ``folder``). They take as many bytes as in the checkpoint.

    Raises:
        ArtifactError: something is missing or damaged, no float weights, or ``scratch`` has too little space.
        DtypeError: weights of another dtype than the configuration's.
    """
    folder = Path(folder)
    check_float(folder, read_config(folder))
    with Checkpoint(folder) as checkpoint:
        stored_dtype = max((checkpoint.spec(name) for name in checkpoint.names()), key=lambda spec: spec.nbytes).dtype
        model = skeleton(folder, stored=stored_dtype, trust_remote_code=trust_remote_code)
        stored = Stored(model, checkpoint)
        files = checkpoint.memory()
        made = _stack_experts(stored, Path(scratch or folder), files, progress)

        def read(name: str, now: torch.Tensor) -> torch.Tensor | None:
            if name in made:
                return now
            source = stored.name(name)
            return _read(checkpoint, source, now) if source in checkpoint else None

        fill(model, stored.groups, read, folder)
    check_filled(model, folder)
    set_mapped(model, files)
    return model


def _read(checkpoint: Checkpoint, name: str, now: torch.Tensor) -> torch.Tensor:
    spec = checkpoint.spec(name)
    if spec.shape != tuple(now.shape):
        raise wrong_shape(name, checkpoint.folder, list(now.shape), list(spec.shape))
    if spec.nbytes < _SMALL_BYTES:
        return checkpoint.read(name).to(now.dtype)
    if spec.dtype != now.dtype:
        raise DtypeError(
            f"{name} in {checkpoint.folder}, mapped",
            expected=f"{dtype_name(now.dtype)}, as config.json says",
            found=dtype_name(spec.dtype),
            fix="Load the model as a whole, or save the checkpoint in one dtype.",
        )
    return checkpoint.mapped(name)


def _stack_experts(stored: Stored, scratch: Path, files: list[MappedFile], progress: bool) -> set[str]:
    """Stack experts that the checkpoint has one by one into new mapped ``files``; the names of the parameters.

    Raises:
        ArtifactError: there is too little space.
    """
    parts: dict[str, list[tuple[FFNSite, str, LinearRef]]] = defaultdict(list)
    for site in search(on_meta(stored.model), on_meta=True, needed=False).sites:
        for role, ref in refs_of(site):
            if ref.expert is not None and stored.name(ref.weight) not in stored.checkpoint:
                parts[ref.weight].append((site, role, ref))
    for name in bar(list(parts), "experts", progress and bool(parts)):
        parameter = stored.model.get_parameter(name)
        spec = Spec(tuple(parameter.shape), parameter.dtype)
        try:
            with tempfile.TemporaryFile(dir=scratch) as file:
                os.posix_fallocate(file.fileno(), 0, spec.nbytes)
                files.append(MappedFile(file.fileno(), shared=True))
        except OSError as error:
            raise not_written(scratch, error) from error
        put(stored.model, [name], files[-1].tensor(spec.shape, spec.dtype, 0))
        for site, role, ref in parts[name]:
            stored.read_expert(site, role, ref)
            files[-1].let_go(ref.take(stored.model.get_parameter(name).detach()))
    return set(parts)
