"""A float checkpoint on disk: its tensors by name, in one or several files, read in pieces.

Some parameters have other names in checkpoints: transformers stacks a block's experts when it loads a checkpoint that
stores them singly, and renames parts of Mixtral and Nemotron-H.
"""

import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from torch_pi2.base.dtypes import DTYPES, dtype_name
from torch_pi2.base.fields import Field
from torch_pi2.base.memory import MappedFile
from torch_pi2.base.reading import Closing, parse, read_bytes
from torch_pi2.base.tensorfile import Spec, TensorReader
from torch_pi2.errors import ArtifactError, DtypeError
from torch_pi2.types.site import FFNSite, LinearRef

_ONE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class Reader(Protocol):
    """A file of tensors, or what makes some of others."""

    def spec(self, name: str) -> Spec: ...

    def read(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor: ...

    def read_into(self, name: str, tensor: torch.Tensor, *, row: int = 0) -> None: ...

    def read_bytes(self, name: str, start: int, stop: int) -> torch.Tensor: ...


class Source(Reader, Protocol):
    """Values for a model's parameters by their names in checkpoints; ``folder``: or file, for messages."""

    folder: Path

    @property
    def nbytes(self) -> int: ...

    def __contains__(self, name: str) -> bool: ...

    def check_float(self, name: str) -> None: ...


class Checkpoint(Closing):
    """Tensors of a Hugging Face folder; ``renamed``, ``converted``: parameter -> tensor's name, or what makes it."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.renamed: dict[str, str] = {}
        self.converted: dict[str, Reader] = {}
        self._files: dict[str, TensorReader] = {}
        self._by_name: dict[str, TensorReader] = {}
        with self.opening():
            for file in self._file_names():
                self._files[file] = reader = TensorReader(self.folder / file)
                if twice := self._by_name.keys() & reader.specs.keys():
                    name = min(twice)
                    found = f"it in {self._by_name[name].path.name} and {file}"
                    fix = "Remove the shard of another time, or get the checkpoint again."
                    raise ArtifactError(str(self.folder), expected=f"{name} in one of its shards", found=found, fix=fix)
                self._by_name |= dict.fromkeys(reader.specs, reader)

    def _file_names(self) -> list[str]:
        index = self.folder / _INDEX
        if os.path.lexists(self.folder / _ONE):
            return [_ONE]
        if not os.path.lexists(index):
            others = sorted(p.name for p in self.folder.glob("*") if p.suffix in (".bin", ".safetensors", ".pth"))
            expected, found = f"{_ONE} or {_INDEX}", ", ".join(others[:3]) or "neither"
            fix = "Load it with transformers (variant='fp16' reads model.fp16.safetensors) and call save_pretrained."
            raise ArtifactError(str(self.folder), expected=expected, found=found, fix=fix)
        expected, fix = "an index of shards", "Copy it again."
        shards = Field(parse(read_bytes(index, expected, fix), index, expected=expected, fix=fix), str(index), fix)
        names = {shard.text(): shard for shard in shards.at("weight_map").each().values()}
        for name, shard in names.items():
            if Path(name).name != name or name in (".", ".."):
                shard.wrong("the name of a file in this folder")
        return sorted(names)

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for file in self._files.values() for spec in file.specs.values())

    def __contains__(self, name: str) -> bool:
        return name in self.converted or self.own(name) in self._by_name

    def own(self, name: str) -> str:
        """The checkpoint's name of a parameter."""
        return self.renamed.get(name, name)

    def names(self) -> list[str]:
        return list(self._by_name)

    def matrices(self) -> list[str]:
        """Names of tensors, or of the matrices that several make up."""
        return self.names()

    def is_packed(self, name: str) -> bool:
        """Whether ``name`` is a matrix in few bits."""
        return False

    def metadata(self) -> dict[str, str]:
        """Metadata of all files' headers."""
        return {name: text for file in self._files.values() for name, text in file.metadata.items()}

    def spec(self, name: str) -> Spec:
        """Raises ArtifactError: there is no such tensor."""
        return self.reader(name).spec(self.own(name))

    def read(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """A copy of the tensor, or of its rows ``[start, stop)``."""
        return self.reader(name).read(self.own(name), rows)

    def read_into(self, name: str, tensor: torch.Tensor, row: int = 0) -> None:
        """Fill ``tensor`` with the tensor's rows from ``row`` on."""
        self.reader(name).read_into(self.own(name), tensor, row=row)

    def mapped(self, name: str) -> torch.Tensor:
        """The tensor in place, in one of the files of :meth:`memory`."""
        return self._by_name[self.own(name)].mapped(self.own(name))

    def memory(self) -> list[MappedFile]:
        return [file.memory for file in self._files.values()]

    def read_bytes(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Bytes ``[start, stop)`` of the tensor, uint8."""
        return self.reader(name).read_bytes(self.own(name), start, stop)

    def check_float(self, name: str) -> None:
        """Raises DtypeError: the tensor is not float (the checkpoint is already quantised)."""
        dtype = self.spec(name).dtype
        if dtype not in DTYPES.values():
            expected, fix = "float32, bfloat16 or float16", "Quantise from the original float checkpoint."
            raise DtypeError(f"{name} in {self.folder}", expected=expected, found=dtype_name(dtype), fix=fix)

    def reader(self, name: str) -> Reader:
        """Raises ArtifactError: there is no such tensor."""
        found = self.converted.get(name) or self._by_name.get(self.own(name))
        if found is None:
            others = f"{len(self._by_name)} others, none of which transformers loads as this one"
            fix = "Get all files again; or name the class that was saved as architectures in its config.json."
            raise ArtifactError(str(self.folder), expected=f"a tensor {name}", found=others, fix=fix)
        return found


def wrong_shape(name: str, folder: Path, expected: object, found: object) -> ArtifactError:
    fix = "The weights are not those of config.json and the plan beside them; get the checkpoint again."
    return ArtifactError(f"{name} in {folder}", expected=str(expected), found=str(found), fix=fix)


#: Part of a parameter's name, and its alternative in checkpoints.
_OTHERS = ((".mlp.", ".block_sparse_moe."), ("model.", "backbone."))
#: Names of an expert's matrices in checkpoints.
_MATRICES = {"gate": ("gate_proj", "w1", "gate"), "up": ("up_proj", "w3", "up"), "down": ("down_proj", "w2", "down")}
_ROLES = {part: role for role, parts in _MATRICES.items() for part in parts}
_EXPERT = re.compile(r"(?:.*\.)?(?P<block>\d+)\.(?:.*\.)?experts\.(?P<expert>\d+)\.(?P<part>\w+)\.weight")


def expert_matrix(name: str) -> tuple[int, int, str] | None:
    """Block, expert and role of a matrix by its name in a checkpoint; None: it belongs to no expert."""
    found = _EXPERT.fullmatch(name)
    if found is None or found["part"] not in _ROLES:
        return None
    return int(found["block"]), int(found["expert"]), _ROLES[found["part"]]


def stored_name(checkpoint: Source, name: str) -> str:
    """The checkpoint's name of parameter ``name``, or ``name`` itself if it has none."""
    return next((n for n in (name, *(name.replace(*pair, 1) for pair in _OTHERS)) if n in checkpoint), name)


class ExpertMatrix:
    """A matrix of one expert in a checkpoint, alone or in a stack of all: its rows, of ``shape``, begin at ``first`` in
    the tensor ``name``. ``in_rows``: they are contiguous there.
    """

    def __init__(self, checkpoint: Source, site: FFNSite, ref: LinearRef, role: str) -> None:
        self._checkpoint = checkpoint
        n, hidden = site.intermediate, site.hidden
        self.shape = (hidden, n) if role == "down" else (n, hidden)
        alone = [stored_name(checkpoint, f"{site.key}.{part}.weight") for part in _MATRICES[role]]
        self.name = next((name for name in alone if name in checkpoint), stored_name(checkpoint, ref.weight))
        self.first, self.stacked, self._ref = 0, self.name not in alone, ref
        self.in_rows = not self.stacked or not (ref.transposed or len(ref.rows or ()) == 3)
        if self.stacked and ref.expert is not None:
            per_expert = hidden if role == "down" else site.rows_per_neuron * n - n
            self.first = ref.expert * per_expert + (ref.rows or (0, 0))[0]
            self._whole = (per_expert, self.shape[1])[:: -1 if ref.transposed else 1]  # the expert's matrix as stored

    @property
    def fits(self) -> bool:
        """Whether the tensor has the right shape. Raises ArtifactError: there is no tensor."""
        shape = self._checkpoint.spec(self.name).shape
        if not self.stacked:
            return shape == self.shape
        if not self.in_rows:
            return shape[1:] == self._whole and shape[0] > (self._ref.expert or 0)
        return len(shape) == 3 and shape[2] == self.shape[1] and self.first + self.shape[0] <= shape[0] * shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Raises ArtifactError: there is no tensor."""
        return self._checkpoint.spec(self.name).dtype

    def read(self) -> torch.Tensor:
        """A copy of the matrix."""
        self.read_into(matrix := torch.empty(self.shape, dtype=self.dtype))
        return matrix

    def read_into(self, matrix: torch.Tensor) -> None:
        """Fill ``matrix``, of :attr:`shape` and :attr:`dtype`."""
        if not self.stacked:
            self._checkpoint.read_into(self.name, matrix)
            return
        if not self.in_rows:
            nbytes = math.prod(self._whole) * matrix.element_size()
            at = (self._ref.expert or 0) * nbytes
            whole = self._checkpoint.read_bytes(self.name, at, at + nbytes).view(matrix.dtype).view(self._whole)
            matrix.copy_(replace(self._ref, expert=None).take(whole))
            return
        per_row = self.shape[1] * matrix.element_size()
        start = self.first * per_row
        data = self._checkpoint.read_bytes(self.name, start, start + math.prod(self.shape) * matrix.element_size())
        matrix.copy_(data.view(matrix.dtype).view(self.shape))
