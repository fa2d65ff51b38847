"""What runs measured, by part or by planner, from what ``plan``, ``bench plan`` and ``bench decode`` print as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch_pi2.base.reading import parse, read_bytes
from torch_pi2.errors import ArtifactError
from torch_pi2.report.facts import Measured, Rivals

#: Parts of ``bench decode`` by those of a plan; ``ffn``: hot, cold, io and merge together.
_DECODE = {
    "linears": "attention",
    "sdpa": "sdpa",
    "predictor": "predictor",
    "ffn": "ffn",
    "head": "head",
    "python": "glue",
}
#: Of ``bench plan``.
_MEMORY = {"whole": "in memory"}


def read_measured(path: str | Path) -> tuple[tuple[Measured, ...], tuple[Rivals, ...]]:
    """Runs in ``path``, and planners compared. Raises ArtifactError: missing, damaged, or nothing of that kind."""
    path = Path(path)
    try:
        data = parse(read_bytes(path), path)
    except ArtifactError as error:
        raise _refused(path, error.found) from error
    try:
        found = _runs(data, path.name), tuple(_rivals(data))
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise _refused(path, f"damage ({type(error).__name__}: {error})") from error
    if not any(found):
        raise _refused(path, "none of them")
    return found


def _refused(path: Path, found: str) -> ArtifactError:
    return ArtifactError(
        f"measured times {path}",
        expected="JSON of `torch-pi2 plan --json`, `bench plan --json`, or `bench decode --json` with batch size 1",
        found=found,
        fix="Measure again: torch-pi2 plan DIR --hardware measured --explain --measure-run --json > FILE.",
    )


def _runs(data: Any, where: str) -> tuple[Measured, ...]:
    if isinstance(data, dict) and "ms_per_token" in data:
        return (_decoded(data, where),)
    found = data.get("explained", ()) if isinstance(data, dict) else ()
    return tuple(_explained(run, where) for run in found)


def _rivals(data: Any) -> Iterator[Rivals]:
    """Of ``plan``, what simple plans are predicted to take; of ``bench plan``, what they took."""
    rows = data if isinstance(data, dict) else {}
    for row in rows.get("buckets", ()):
        if row["gain"]:
            rate = _number(row["tokens_per_s"])
            others = {str(name): rate / _number(times) for name, times in row["gain"].items()}
            yield Rivals(f"batch {_batch(row)}", False, {"this plan": rate, **others})
    for row in rows.get("rows", ()) if rows.get("what") == "plan" else ():
        rates = {str(name): _number(rate) for name, rate in row["tokens_per_s"].items()}
        case = f"batch {_batch(row)}, {_MEMORY.get(row['memory'], 'over a store')}"
        yield Rivals(case, True, {"this plan": rates.pop("planned"), **rates})


def _decoded(data: Mapping[str, Any], where: str) -> Measured:
    found = data["ms_per_token"]
    ms = {part: _ms(found[name]) for name, part in _DECODE.items() if found[name] is not None}
    return Measured(where, _batch(data), ms, {})


def _explained(data: Mapping[str, Any], where: str) -> Measured:
    ms = {str(row["part"]): _ms(row["measured_ms"]) for row in data["parts"]}
    return Measured(where, _batch(data), ms, {str(p): _ms(value) for p, value in data["predicted_ms"].items()})


def _batch(data: Mapping[str, Any]) -> int:
    if type(data["batch"]) is not int or data["batch"] < 1:
        raise ValueError(f"{data['batch']!r} is no number of sequences")
    return int(data["batch"])


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no number")
    return float(value)


def _ms(value: Any) -> float:
    return max(0.0, _number(value))  # a difference of medians may be less than nothing, which cannot be stacked
