"""What ``torch-pi2 inspect`` says of a checkpoint that is not optimised: what would be done with it, and why not."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from torch_pi2.cli import common
from torch_pi2.errors import ConfigError


def describe_checkpoint(folder: Path, verify: bool, trust_remote_code: bool) -> dict[str, Any]:
    """``contains`` and the fields of :class:`torch_pi2.planner.supported.Supported`, ``layers`` those that can be
    sparse; ``quantised_by``: whose method has quantised it, empty: none has.

    Raises:
        ArtifactError: transformers cannot build the model. ConfigError: ``verify``, and there are no checksums.
        CalibrationError, UnsupportedModelError: it cannot be captured without its inputs, or at all.
    """
    from torch_pi2.planner.supported import supported
    from torch_pi2.store.folder import quantised_by, read_config

    if verify:
        raise nothing_to_verify(folder)
    said = supported(folder, trust_remote_code=trust_remote_code).to_json()
    return {"contains": ["checkpoint"], **said, "quantised_by": quantised_by(read_config(folder))}


def nothing_to_verify(folder: Path) -> ConfigError:
    return ConfigError(
        "--verify",
        expected=f"a neuron store pi2/model.pi2 in {folder}",
        found="none",
        fix="Leave it out: other files have no checksums. torch-pi2 pack makes stores.",
    )


def render_checkpoint(result: dict[str, Any]) -> str:
    rows = []
    for (form, hidden, neurons, method, lossless), group in groupby(result["layers"], key=_alike):
        keys = [layer["key"] for layer in group]
        named = keys[0] if len(keys) == 1 else f"{keys[0]} to {keys[-1]}"
        how = "zeros: lossless" if lossless else "small values: lossy, needs calibration text"
        rows.append([named, len(keys), form, hidden, neurons, method, how])
    header = ["feed-forward layers", "count", "form", "hidden", "neurons", "method", "what is skipped"]
    lines = [f"checkpoint of {result['model']}, not optimised: no weights were read"]
    if (method := result.get("quantised_by")) and not result["refused"]:
        lines.append(f"its weights are what {method!r} has quantised: torch-pi2 import it first, and take that folder")
    if rows:
        share = common.percent(result["share"])
        lines += [common.table(header, rows), f"{share} of {result['parameters']:,} parameters are in these layers"]
    if result["refused"]:
        lines.append(f"nothing can be made sparse: {result['refused']}")
    return "\n".join(lines + stays_dense(result["left"]))


def stays_dense(left: dict[str, str]) -> list[str]:
    """Lines that say which layers stay dense, and why."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in left.items():
        by_reason.setdefault(reason, []).append(name)
    lines = []
    for reason, names in by_reason.items():
        which = names[0] if len(names) == 1 else f"{len(names)} layers, {names[0]} to {names[-1]}"
        lines.append(f"stays dense: {which}: {reason}")
    return lines


def _alike(layer: dict[str, Any]) -> tuple[Any, ...]:
    """What layers that share a line of the table have in common."""
    return tuple(layer[name] for name in ("form", "hidden", "neurons", "method", "lossless"))
