"""Of what weights an artefact was made, compared with those that there are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch_pi2.errors import ArtifactError, StaleArtifactError


def check_artifact(path: Path | str, meta: Mapping[str, str], fmt: str, version: int, model_hash: str | None) -> None:
    """Refuse a tensor file of another format or version, or one made from other weights."""
    if meta.get("format") != fmt or meta.get("version") != str(version):
        raise ArtifactError(
            str(path),
            expected=f"{fmt} version {version}",
            found=f"{meta.get('format')} version {meta.get('version')}",
            fix="Use the torch_pi2 that wrote it, or make it again.",
        )
    if "model_hash" not in meta:
        raise ArtifactError(
            str(path), expected="the hash of a model's weights", found="none", fix="The file is damaged; make it again."
        )
    if model_hash is not None and meta["model_hash"] != model_hash:
        raise StaleArtifactError(
            str(path),
            expected=f"made from FFN weights {model_hash[:12]}",
            found=meta["model_hash"][:12],
            fix="It belongs to another model or to an older checkpoint; make it again for this one.",
        )
