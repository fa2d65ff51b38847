"""What is in a program of ExecuTorch (``model.pte``): delegates and operators of its methods, and its bytes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from torch_pi2.base.extras import missing_package
from torch_pi2.errors import ArtifactError

#: Bytes of the head of a file that has an extended header, as ExecuTorch's C++ reads them.
_HEAD = 64


def describe_program(path: str | Path) -> dict[str, Any]:
    """What is in the program at ``path``, without reading its weights.

    ExecuTorch has no public Python function for this; its own reader of the flatbuffer is used, on the part of the file
    that is before the weights.

    Returns:
        ``methods``: name -> ``delegates`` (backend -> how many calls) and ``operators`` (name -> how many calls of
        CPU kernels). ``bytes``: ``program`` (graphs), ``constants``, ``mutable`` (initial values), ``delegates``
        (backend -> bytes of its blobs; one that several share counts once), ``named`` (weights that delegates have by
        name), and ``padding``.

    Raises:
        LibraryMissingError: ExecuTorch is not installed. ArtifactError: the file is missing, cut, or no program.
    """
    try:
        from executorch.exir._serialize import _program as reader
    except ImportError as error:
        raise missing_package("executorch", "export", error, "it, to read a .pte") from error
    path = Path(path)
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
            header = reader._get_extended_header(head)
            size, whole = header.program_size if header else None, path.stat().st_size
            data = head + (file.read() if size is None else file.read(max(0, size - len(head))))
            if len(data) < 8 or data[4:6] != b"ET":
                raise ValueError("no program of ExecuTorch")
            end = len(data) if header is None else header.segment_base_offset + header.segment_data_size
            if whole < end or (size is not None and len(data) < size):
                raise ValueError(f"{whole} of {end} bytes")
            program = reader._flatbuffer_to_program(data)
        methods = {plan.name: _method(plan) for plan in program.execution_plan}
        return {"methods": methods, "bytes": _bytes(program, len(data), whole)}
    except Exception as error:  # the reader of flatbuffers trips over damage in many ways
        raise ArtifactError(
            str(path),
            expected="a whole program of ExecuTorch",
            found=f"damage ({str(error) or type(error).__name__})",
            fix="Copy the bundle again, or export again.",
        ) from error


def _method(plan: Any) -> dict[str, dict[str, int]]:
    """How often delegates and operators are called in all chains of a method."""
    delegates: Counter[str] = Counter()
    operators: Counter[str] = Counter()
    for instruction in (i.instr_args for chain in plan.chains for i in chain.instructions):
        if hasattr(instruction, "delegate_index"):
            delegates[plan.delegates[instruction.delegate_index].id] += 1
        elif hasattr(instruction, "op_index"):
            found = plan.operators[instruction.op_index]
            operators[f"{found.name}.{found.overload}" if found.overload else found.name] += 1
    return {"delegates": dict(delegates.most_common()), "operators": dict(operators.most_common())}


def _bytes(program: Any, program_bytes: int, whole: int) -> dict[str, Any]:
    """What the segments of the file are for; what is in none of them is padding."""
    sizes = [segment.size for segment in program.segments]
    parts: dict[str, Any] = {"program": program_bytes, "constants": 0, "mutable": 0, "named": 0, "delegates": {}}
    if program.constant_segment and program.constant_segment.offsets:
        parts["constants"] = sizes[program.constant_segment.segment_index]
    for mutable in program.mutable_data_segments or ():
        parts["mutable"] += sizes[mutable.segment_index]
    parts["named"] = sum(sizes[i] for i in {entry.segment_index for entry in program.named_data or ()})
    seen: set[int] = set()
    for delegate in (d for plan in program.execution_plan for d in plan.delegates):
        place = delegate.processed
        if place.location == 0:  # in the flatbuffer itself
            count = len(program.backend_delegate_data[place.index].data)
            parts["program"] -= count
        elif place.index in seen:
            continue
        else:
            seen.add(place.index)
            count = sizes[place.index]
        parts["delegates"][delegate.id] = parts["delegates"].get(delegate.id, 0) + count
    parts["padding"] = (
        whole - sum(parts[n] for n in ("program", "constants", "mutable", "named")) - sum(parts["delegates"].values())
    )
    return parts
