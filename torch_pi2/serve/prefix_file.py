"""A block of keys and values as a file: a safetensors file that says what it is of, with a checksum over all of it.

docs/FORMATS.md has the format. Whatever is wrong with a file, it is an ArtifactError, and who wanted it computes the
block again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import torch

from torch_pi2.base.tensorfile import Spec, TensorReader, TensorWriter
from torch_pi2.errors import ArtifactError
from torch_pi2.store.storefile import block_checks, metadata_check, tensor_check

PREFIX_FORMAT, PREFIX_VERSION = "torch_pi2.prefix", "1"
#: What stands in a file's metadata beside its checksum.
_NAMES = ("format", "version", "identity", "block")

#: Keys and values of a block, by layer.
Block = list[torch.Tensor]


def write_block(path: Path, block: Block, identity: str, name: str) -> None:
    """Write keys and values, for nobody else to read. Raises ArtifactError: it cannot be, or another process does.

    Args:
        identity: of what computed them (:func:`torch_pi2.serve.identity.identity`). name: hash of the tokens.
    """
    tensors = {str(i): tensor for i, tensor in enumerate(block)}
    said = dict(zip(_NAMES, (PREFIX_FORMAT, PREFIX_VERSION, identity, name), strict=True))
    specs = {i: Spec.of(tensor) for i, tensor in tensors.items()}
    with TensorWriter(path, specs, said | {"check": _check(said, tensors)}, private=True) as out:
        for i, tensor in tensors.items():
            out.write(i, tensor)


def read_block(path: Path, specs: Sequence[Spec], identity: str, name: str) -> Block:
    """Keys and values of shapes and dtypes ``specs``, all of them compared with the checksum.

    Raises:
        ArtifactError: missing, damaged, of another version, or of other tokens or another ``identity``.
    """
    with TensorReader(path) as file:
        said = dict(zip(_NAMES, (PREFIX_FORMAT, PREFIX_VERSION, identity, name), strict=True))
        found = {known: file.metadata.get(known) for known in said}
        if found != said:
            wrong = next(known for known in said if found[known] != said[known])
            _refuse(path, f"{wrong} {said[wrong]}", str(found[wrong]))
        wanted = {str(i): spec for i, spec in enumerate(specs)}
        if file.specs != wanted:
            _refuse(path, f"{len(wanted)} tensors, the first {next(iter(wanted.values()), None)}", "others")
        tensors = {i: file.read(i) for i in wanted}
        check = file.metadata.get("check")
    if _check(said, tensors) != check:
        _refuse(path, f"checksum {_check(said, tensors)}, that of what it has", str(check))
    return list(tensors.values())


def _check(said: Mapping[str, str], tensors: Mapping[str, torch.Tensor]) -> str:
    """CRC32C of metadata, and of names, dtypes, shapes and bytes of tensors: 8 hexadecimal digits."""
    checks = {
        i: tensor_check(i, Spec.of(tensor), [block_checks(tensor.contiguous().reshape(-1).view(torch.uint8))])
        for i, tensor in tensors.items()
    }
    return metadata_check({**said, **checks})


def _refuse(path: Path, expected: str, found: str) -> NoReturn:
    raise ArtifactError(str(path), expected=expected, found=found[:200], fix="Delete it; it is computed again.")
