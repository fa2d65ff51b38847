"""Figures of our delegate's calls in an ETDump, for ExecuTorch's Inspector. Needs no executorch."""

from __future__ import annotations

import json
from collections.abc import Sequence

#: Figures of a call, in the order of the dump.
FIGURES = ("tokens", "wanted", "hits", "reads", "bytes_read", "wait_ns", "submit_wait_ns")
_MARK = b'{"pi2": 1, '


def call_figures(metadata: Sequence[bytes]) -> dict[str, list[int]] | list[bytes]:
    """``delegate_metadata_parser`` of ``executorch.devtools.Inspector``: what each call of a layer did.

    ``Event.delegate_debug_metadatas`` is then what this returns, and
    ``event_block.to_dataframe(include_delegate_debug_data=True)`` has a column for each figure.

    Args:
        metadata: of one event, an item for each time that the method was executed.

    Returns:
        For each of :data:`FIGURES` a list of as many numbers. ``wanted``: neurons that were computed, ``hits`` those of
        them that were in memory; ``reads`` and ``bytes_read``: what the call read of the store, for itself or ahead for
        the next; ``wait_ns``: waiting for reads, a sum over threads; ``submit_wait_ns``: ``pi2_collect`` waiting for
        what was computed beside an accelerator. Empty for other delegates' events without metadata; metadata that is
        not ours as it is.
    """
    if not all(item and bytes(item).startswith(_MARK) for item in metadata):
        return list(metadata)
    calls = [json.loads(bytes(item)) for item in metadata]
    return {name: [call[name] for call in calls] for name in FIGURES} if calls else {}
