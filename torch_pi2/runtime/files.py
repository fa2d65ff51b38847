"""Files written whole or not at all: temporary file, fsync, rename. Read back with errors that help."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torch_pi2.errors import ArtifactError

Tensors = Mapping[str, torch.Tensor]


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())


def atomic_write(path: str | Path, data: bytes | str) -> None:
    """Write ``data`` to ``path`` by temporary file, fsync and rename. Raises ArtifactError if it cannot."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_synced(temporary, data.encode() if isinstance(data, str) else data)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True) if temporary.parent.is_dir() else None
        raise ArtifactError(
            f"writing {path}",
            expected="a folder that can be written",
            found=f"{error.strerror or error}",
            fix="Choose another output folder or free some space; nothing was left half-written.",
        ) from error


def atomic_folder_files(folder: str | Path, files: Mapping[str, str | bytes | tuple[Tensors, dict[str, str]]]) -> None:
    """Write several files into ``folder``, each atomically; a tensor entry is ``(tensors, metadata)``."""
    from safetensors.torch import save

    for name, content in files.items():
        if isinstance(content, tuple):
            tensors, metadata = content
            content = save({k: v.contiguous() for k, v in tensors.items()}, metadata=metadata)
        atomic_write(Path(folder) / name, content)


def read_json(path: str | Path, format_name: str, version: int) -> dict[str, Any]:
    """Parse one of our JSON files and check its ``format`` and ``version``."""
    path = Path(path)
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ArtifactError(str(path), expected="a file", found="nothing", fix="Check the folder's name.") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ArtifactError(
            str(path), expected="JSON", found=f"damage ({error})", fix="Make the artefact again."
        ) from error
    if not isinstance(data, dict) or data.get("format") != format_name or data.get("version") != version:
        found = f"{data.get('format')} version {data.get('version')}" if isinstance(data, dict) else type(data).__name__
        raise ArtifactError(
            str(path),
            expected=f"{format_name} version {version}",
            found=found,
            fix="Use the torch_pi2 that wrote it, or make it again.",
        )
    return data


def read_tensors(path: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file, copied into memory."""
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise ArtifactError(str(path), expected="a safetensors file", found="nothing", fix="Check the folder's name.")
    try:
        with safe_open(path, framework="pt") as f:
            names: list[str] = list(f.keys())
            return {name: f.get_tensor(name) for name in names}, dict(f.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise ArtifactError(
            str(path), expected="a whole safetensors file", found=f"damage ({error})", fix="Make the artefact again."
        ) from error
