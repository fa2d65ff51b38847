"""A model in one GGUF file, or in several, as llama.cpp's ``gguf-split`` makes them: read as one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NoReturn

import torch

from torch_pi2.base.fields import shown
from torch_pi2.errors import ArtifactError
from torch_pi2.store.gguf import SUFFIX, GgufFile, is_gguf

_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.DOTALL | re.IGNORECASE)
_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"
#: Of a name: five digits.
_MOST_PARTS = 99_999


def gguf_in(path: str | Path) -> Path | None:
    """The GGUF file that ``path`` names, or that is in a folder of no other checkpoint (of parts the first).

    None: there is none. Raises ArtifactError: several models are in the folder.
    """
    path = Path(path)
    if not path.is_dir():
        return path if is_gguf(path) else None
    found: dict[str, Path] = {}
    for file in [] if (path / "config.json").exists() else sorted(path.glob("*")):
        if file.suffix.lower() == SUFFIX and file.is_file():
            part = _NAME.fullmatch(file.name)
            found.setdefault(part["stem"] if part else file.name, file)
    if len(found) > 1:
        names = [file.name for file in found.values()]
        more = f" and {len(names) - 3} others" if len(names) > 3 else ""
        raise ArtifactError(
            str(path), expected="one GGUF model", found=", ".join(names[:3]) + more, fix="Name the file that is meant."
        )
    return next(iter(found.values()), None)


class GgufModel(GgufFile):
    """The model of a GGUF file: its own tensors and, where it is one of several parts, those of the others.

    Attributes:
        path, version, size: of the first part, whose ``metadata`` counts. tensors: of all, by name.
        paths: of the parts, in order.

    Raises:
        ArtifactError: as :class:`GgufFile`; or a part is missing, has another's name, or is of another model (whose
            metadata differ, or whose tensors are not those that are missing).
    """

    def __init__(self, path: str | Path) -> None:
        self._others: list[GgufFile] = []
        self._owners: dict[str, GgufFile] = {}
        self._first: GgufFile = self
        super().__init__(path)
        try:
            self.paths = [self.path]
            if self.metadata.get(_COUNT, 1) != 1:
                self._join()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for part in self._others:
            part.close()
        super().close()

    def _join(self) -> None:
        self.paths = self._names()
        mine = self._number_of(self)
        parts: list[GgufFile] = []
        for number, path in enumerate(self.paths):
            part = self if number == mine else self._open(path, number)
            if (found := self._number_of(part)) != number:
                said = "a file that is none" if found is None else f"part {found + 1}"
                self._refuse(path, f"part {number + 1} of {len(self.paths)}", said)
            parts.append(part)
        first, tensors = parts[0], {}
        self._first = first
        for path, part in zip(self.paths, parts, strict=True):
            self._check_same(path, part, first)
            for name, tensor in part.tensors.items():
                if name in tensors:
                    self._refuse(path, "tensors that no other part has", f"{shown(name)}, which another has as well")
                tensors[name] = tensor
                self._owners[name] = part
        wanted = first.metadata.get(_TENSORS)
        if wanted != len(tensors):
            self._refuse(self.paths[0], f"parts of {len(tensors)} tensors, as they are", f"{_TENSORS} {shown(wanted)}")
        self.path, self.version, self.size, self.metadata = self.paths[0], first.version, first.size, first.metadata
        self.tensors = tensors

    def _names(self) -> list[Path]:
        """Of all parts, from that of this one."""
        count, found = self.metadata[_COUNT], _NAME.fullmatch(self.path.name)
        if type(count) is not int or not 1 <= count <= _MOST_PARTS:
            self._damaged(f"{_COUNT} {shown(count)}")
        number = self.metadata.get(_NUMBER)
        if type(number) is not int or not 0 <= number < count:
            self._damaged(f"{_NUMBER} {shown(number)} of {count}")
        if found is None or (int(found["number"]), int(found["count"])) != (number + 1, count):
            self._refuse(
                self.path,
                f"the name of part {number + 1} of {count}, NAME-{number + 1:05}-of-{count:05}.gguf, by which the "
                "others are found",
                self.path.name,
            )
        stem, suffix = found["stem"], found["suffix"]
        return [self.path.with_name(f"{stem}-{one:05}-of-{count:05}{suffix}") for one in range(1, count + 1)]

    def _open(self, path: Path, number: int) -> GgufFile:
        if not path.exists():
            self._refuse(path, f"part {number + 1} of {len(self.paths)} of a model, beside the others", "nothing")
        self._others.append(GgufFile(path))
        return self._others[-1]

    def _number_of(self, part: GgufFile) -> int | None:
        number = part.metadata.get(_NUMBER)
        return number if type(number) is int else None

    def _check_same(self, path: Path, part: GgufFile, first: GgufFile) -> None:
        """What two parts both say is the same. Raises ArtifactError."""
        expected = f"a part of the model of {self.paths[0].name}"
        for key in (_COUNT, _TENSORS):
            if key not in part.metadata:
                self._refuse(path, expected, f"a file without {key}")
        for key, value in part.metadata.items():
            wanted = first.metadata.get(key, value)
            if key not in (_NUMBER, "general.alignment") and wanted != value:
                self._refuse(path, expected, f"{shown(key)} {shown(value)} where that has {shown(wanted)}")

    def _refuse(self, path: Path, expected: str, found: str) -> NoReturn:
        raise ArtifactError(
            str(path), expected=expected, found=found, fix="Put all parts of one model into one folder, by their names."
        )

    def texts(self, name: str) -> list[bytes]:
        return super().texts(name) if self._first is self else self._first.texts(name)

    def ends_of(self, name: str) -> bytes:
        owner = self._owners.get(name, self)
        return super().ends_of(name) if owner is self else owner.ends_of(name)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        owner = self._owners.get(name, self)
        return super().read_rows(name, start, stop) if owner is self else owner.read_rows(name, start, stop)
