"""A float checkpoint on disk: its tensors by name, one file or many, read piece by piece."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol, Self

import torch

from torch_pi2.base.fields import Field
from torch_pi2.base.mapped import MappedFile
from torch_pi2.base.reading import parse, read_bytes
from torch_pi2.base.tensorfile import Spec, TensorReader
from torch_pi2.errors import ArtifactError, DtypeError
from torch_pi2.ops.dtypes import DTYPES, dtype_name

_ONE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class Source(Protocol):
    """What has the numbers of a model's parameters, under their names in checkpoints.

    Attributes:
        folder: the folder or file, for messages. nbytes: of all its tensors.
    """

    folder: Path

    @property
    def nbytes(self) -> int: ...

    def __contains__(self, name: str) -> bool: ...

    def spec(self, name: str) -> Spec: ...

    def read(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor: ...

    def read_into(self, name: str, tensor: torch.Tensor, row: int = 0) -> None: ...

    def read_bytes(self, name: str, start: int, stop: int) -> torch.Tensor: ...

    def check_float(self, name: str) -> None: ...


class Checkpoint:
    """The tensors of a Hugging Face folder (``model.safetensors``, or the shards that its index names).

    Raises:
        ArtifactError: no safetensors there, or something is damaged.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._files: dict[str, TensorReader] = {}
        self._by_name: dict[str, TensorReader] = {}
        try:
            for file in self._file_names():
                self._files[file] = reader = TensorReader(self.folder / file)
                if twice := self._by_name.keys() & reader.specs.keys():
                    raise self._twice(min(twice), file)
                self._by_name |= dict.fromkeys(reader.specs, reader)
        except BaseException:
            self.close()
            raise

    def _twice(self, name: str, file: str) -> ArtifactError:
        return ArtifactError(
            str(self.folder),
            expected=f"{name} in one of its shards",
            found=f"it in {self._by_name[name].path.name} and {file}",
            fix="Remove the shard of another time, or get the checkpoint again.",
        )

    def _file_names(self) -> list[str]:
        index = self.folder / _INDEX
        if os.path.lexists(self.folder / _ONE):
            return [_ONE]
        if not os.path.lexists(index):
            others = sorted(p.name for p in self.folder.glob("*.bin")) if self.folder.is_dir() else []
            raise ArtifactError(
                str(self.folder),
                expected=f"{_ONE} or {_INDEX}",
                found=", ".join(others[:3]) or "neither",
                fix="Save the model with save_pretrained, which writes safetensors.",
            )
        expected, fix = "an index of shards", "Copy it again."
        shards = Field(parse(read_bytes(index, expected, fix), index, expected=expected, fix=fix), str(index), fix)
        names = {shard.text(): shard for shard in shards.at("weight_map").each().values()}
        for name, shard in names.items():
            if Path(name).name != name or name in (".", ".."):
                shard.wrong("the name of a file in this folder")
        return sorted(names)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    @property
    def nbytes(self) -> int:
        """Of all its tensors."""
        return sum(spec.nbytes for file in self._files.values() for spec in file.specs.values())

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def names(self) -> list[str]:
        """Of all its tensors."""
        return list(self._by_name)

    def metadata(self) -> dict[str, str]:
        """Strings by name, of all files' headers."""
        return {name: text for file in self._files.values() for name, text in file.metadata.items()}

    def spec(self, name: str) -> Spec:
        """Raises ArtifactError if there is no such tensor."""
        return self._file(name).spec(name)

    def read(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """The tensor, or its rows ``[start, stop)``, in memory of its own."""
        return self._file(name).read(name, rows)

    def read_into(self, name: str, tensor: torch.Tensor, row: int = 0) -> None:
        """Fill ``tensor`` with the tensor's rows from ``row`` on."""
        self._file(name).read_into(name, tensor, row=row)

    def mapped(self, name: str) -> torch.Tensor:
        """The tensor where it is, in one of the files of :meth:`memory`."""
        return self._file(name).mapped(name)

    def memory(self) -> list[MappedFile]:
        """Its files as memory."""
        return [file.memory for file in self._files.values()]

    def read_bytes(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Bytes ``[start, stop)`` of the tensor, uint8."""
        return self._file(name).read_bytes(name, start, stop)

    def check_float(self, name: str) -> None:
        """Raises DtypeError if the tensor is no float matrix that can be quantised (a checkpoint quantised already)."""
        dtype = self.spec(name).dtype
        if dtype not in DTYPES.values():
            raise DtypeError(
                f"{name} in {self.folder}",
                expected="float32, bfloat16 or float16",
                found=dtype_name(dtype),
                fix="Quantise from the original float checkpoint.",
            )

    def _file(self, name: str) -> TensorReader:
        if name not in self._by_name:
            raise ArtifactError(
                str(self.folder),
                expected=f"a tensor {name}",
                found=f"{len(self._by_name)} others",
                fix="Load the model with transformers and save it again with save_pretrained, then quantise that.",
            )
        return self._by_name[name]
