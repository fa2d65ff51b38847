"""Figures of our delegate's calls in an ETDump, for ExecuTorch's Inspector. Needs no executorch."""

import json
from collections.abc import Sequence

#: Figures of a call, in the order of the dump.
FIGURES = ("tokens", "wanted", "hits", "reads", "bytes_read", "wait_ns", "submit_wait_ns")
_MARK = b'{"pi2": 1, '


def call_figures(metadata: Sequence[bytes]) -> dict[str, list[int]] | list[bytes]:
    """``delegate_metadata_parser`` of ``executorch.devtools.Inspector``: statistics of each call of a layer.

    ``Event.delegate_debug_metadatas`` then has the result, and
    ``event_block.to_dataframe(include_delegate_debug_data=True)`` a column for each figure.

    Args:
        metadata: of one event, an item per execution of the method.

    Returns:
        For each of :data:`FIGURES` a list with a number per item. ``wanted``: computed neurons, ``hits`` those in the
        cache; ``reads`` and ``bytes_read`` from the store, with read-ahead for the next layer; ``wait_ns``: waiting for
        reads, summed over threads; ``submit_wait_ns``: ``pi2_collect`` waiting for the cold part. Metadata of other
        delegates is returned as it is.
    """
    if not all(item and bytes(item).startswith(_MARK) for item in metadata):
        return list(metadata)
    calls = [json.loads(bytes(item)) for item in metadata]
    return {name: [call[name] for call in calls] for name in FIGURES} if calls else {}
