"""What a bundle takes in memory without its neurons: ``memory.fixed_bytes`` of the manifest.

The C++ runner's resident memory, mapped files included, stays below it and the neuron cache (``docs/BUNDLE.md``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from torch_pi2.decode.budget import scratch_bytes
from torch_pi2.ops.constants import constants
from torch_pi2.store.budget import engine_bytes
from torch_pi2.store.superblock import LayerEntry
from torch_pi2.types.offload import OffloadConfig

#: The runner with its libraries, stacks and thread pool, before anything is loaded (11 MB on x86-64), and the 4 MiB
#: in which the cache is filled.
_PROCESS_BYTES = 20 << 20
#: Of which the process may have so many; and, of a row of sums, what is padding, largest score and total.
_THREADS, _PADDING = 8, 18
#: Times a tokenizer's file: while it is read, before anything else is loaded, and from then on (measured: 6 and 2.6).
_TOKENIZER_READ, _TOKENIZER_KEPT = 8, 4


def fixed_bytes(
    pte: int,
    packed: int,
    copies: int,
    planned: int,
    workspace: int,
    predictors: int,
    entries: Sequence[LayerEntry],
    tokens: int,
    tokenizer: int,
) -> int:
    """Bytes of a bundle's process without the neuron cache.

    Args:
        pte: of the program, all of which may be touched. packed: of it, what XNNPACK has in a form of its own instead.
        copies: how often it has that; 1 if methods share it.
        planned: ExecuTorch's memory of the methods, which share it. workspace: of :func:`workspace_bytes`.
        predictors: with the biases. entries: of the store's layers. tokens: of one call, at most.
        tokenizer: of its file.
    """
    program = pte + (copies - 1) * packed + planned + workspace
    engine = predictors
    if entries:
        engine += sum(engine_bytes(entries, OffloadConfig())) + max(scratch_bytes(e, tokens) for e in entries)
    return _PROCESS_BYTES + max(_TOKENIZER_KEPT * tokenizer + program + engine, _TOKENIZER_READ * tokenizer)


def workspace_bytes(edge: Any) -> int:
    """What XNNPACK needs for tensors within its delegates, which all share it, the most that live at once in any; and
    our attention for its sums, and experts for theirs.
    """
    found, attention, experts = [0], [0], [0]
    for key in edge.methods:
        module = edge.exported_program(key).graph_module
        for lowered in _lowered(module):
            if lowered.backend_id == "XnnpackBackend":
                found.append(_most_alive(lowered.original_module.graph))
            graph = lowered.original_module.graph
            experts += [_experts_bytes(node) for node in graph.nodes if "pi2.delegate_experts" in str(node.target)]
        calls = (node for node in module.graph.nodes if "pi2.cached_attention" in str(node.args[:1]))
        attention += (_attention_bytes(call) for call in calls)
    return max(found) + max(attention) + max(experts)


def _attention_bytes(call: Any) -> int:
    """Of a call of ``cached_attention``, at most: sums of each split of the positions, of the tiles in work at once."""
    core = constants()
    heads, width = (call.kwargs["query"].meta["val"].shape[i] for i in (1, 3))
    _, key_heads, length, _ = call.kwargs["_all_bases"][0].meta["val"].shape
    rows, splits = max(core.attention_rows, heads // key_heads), -(-length // core.attention_split)
    tile = 4 * splits * rows * (width + _PADDING) + length * rows // 8
    return int(2 * _THREADS * tile)


def _experts_bytes(call: Any) -> int:
    """Of a mixture (csrc/ffn/experts.cc): a slice's results, gathered inputs and lists of its tokens."""
    (tokens, hidden), (_, slots) = (_sizes(call.args[i].meta["val"]) for i in (0, 3))
    slice_tokens = min(tokens, max(64, constants().expert_bytes // ((slots + 2) * hidden * 4)))
    return int(slice_tokens * ((slots + 2) * hidden * 4 + slots * 16))


def _lowered(module: Any) -> Iterator[Any]:
    for node in module.graph.nodes:
        if "executorch_call_delegate" in str(node.target):
            yield getattr(module, node.args[0].target)


def _most_alive(graph: Any) -> int:
    """Inputs and outputs are in ExecuTorch's memory. A product of matrices has its second one once more, packed."""
    nodes = list(graph.nodes)
    outputs = set(nodes[-1].all_input_nodes)
    last = {used: i for i, node in enumerate(nodes) for used in node.all_input_nodes}
    alive = most = 0
    ends: dict[int, int] = {}
    for i, node in enumerate(nodes):
        inside = node.op == "call_function" and node not in outputs
        size = _bytes(node.meta.get("val")) if inside else 0
        alive += size
        packed = _bytes(node.args[1].meta.get("val")) if "bmm" in str(node.target) else 0
        most = max(most, alive + packed)
        end = last.get(node, i)
        ends[end] = ends.get(end, 0) + size
        alive -= ends.pop(i, 0)
    return most


def _sizes(tensor: torch.Tensor) -> list[int]:
    """The largest that were allowed when it was traced."""
    from executorch.exir.sym_util import eval_shape_upper_bound

    return list(eval_shape_upper_bound(tensor.shape))


def _bytes(value: Any) -> int:
    """Of a tensor, or of several, at their largest sizes."""
    if isinstance(value, list | tuple):
        return sum(map(_bytes, value))
    if not isinstance(value, torch.Tensor):
        return 0
    size: int = value.element_size()
    for count in _sizes(value):
        size *= count
    return size
