"""Descriptions of storage devices that come with the package; the format is in docs/DEVICES.md.

``from`` is where a figure was published; ``assumed`` says what of it, or that all of it, was not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KB4, _KB512, _MB128, _MB512 = 4 << 10, 512 << 10, 128 << 20, 512 << 20
_PAPER = "PowerInfer-2, arXiv 2406.06282v3"
_MEASURED = f"{_PAPER}, measurements of UFS 4.0 around Fig. 3b"

_UFS_4_0: Mapping[str, Any] = {
    "name": "ufs-4.0",
    "source": f"{_PAPER}: OnePlus 12, Snapdragon 8 Gen 3, UFS 4.0",
    "latency_us": {
        "value": 5.3,
        "assumed": "what 4 KB take longer at 450 MB/s (sequential, if one at a time) than at 1,076 MB/s (if 32 are)",
    },
    "max_depth": {"value": 32, "from": "Ripple, arXiv 2410.19274: one command queue of 32 entries"},
    "cores": [
        {"name": "big", "block_bytes": _KB4, "mb_per_s": 1076.10, "from": f"{_PAPER}, Table 1"},
        {"name": "mid", "block_bytes": _KB4, "mb_per_s": 1007.95, "from": f"{_PAPER}, Table 1"},
        {"name": "little", "block_bytes": _KB4, "mb_per_s": 761.87, "from": f"{_PAPER}, Table 1"},
    ],
    "random": [
        {
            "block_bytes": _KB4,
            "range_bytes": _MB128,
            "depth": 32,
            "mb_per_s": 1076.10,
            "from": f"{_PAPER}, Table 1, big core",
            "assumed": "the depth",
        },
        {
            "block_bytes": _KB4,
            "range_bytes": _MB512,
            "depth": 32,
            "mb_per_s": 850,
            "from": f"{_MEASURED}: below 850 MB/s",
            "assumed": "just below; the depth and the core",
        },
        {
            "block_bytes": _KB512,
            "range_bytes": _MB128,
            "depth": 32,
            "mb_per_s": 3500,
            "from": _MEASURED,
            "assumed": "the range, the depth and the core",
        },
        {
            "block_bytes": _KB512,
            "range_bytes": _MB512,
            "depth": 32,
            "mb_per_s": 3500,
            "assumed": "no effect of the range at this size; the paper says that it is strongest for small blocks",
        },
    ],
    "sequential": [
        {
            "block_bytes": _KB4,
            "depth": 1,
            "mb_per_s": 450,
            "from": _MEASURED,
            "assumed": "the depth: less than random reads of this size can only be one at a time; the core",
        },
        {"block_bytes": _KB4, "depth": 32, "mb_per_s": 1076.10, "assumed": "as random reads over 128 MB"},
        {"block_bytes": _KB512, "depth": 1, "mb_per_s": 3844.5, "assumed": "4,000 MB/s and the latency"},
        {
            "block_bytes": _KB512,
            "depth": 32,
            "mb_per_s": 4000,
            "from": _MEASURED,
            "assumed": "the depth and the core",
        },
    ],
}


def _halved(row: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in row.items() if key not in ("from", "assumed")}
    return {**kept, "mb_per_s": row["mb_per_s"] / 2, "assumed": "half of UFS 4.0"}


_UFS_3_1: Mapping[str, Any] = {
    "name": "ufs-3.1",
    "source": "assumed: every bandwidth is half of ufs-4.0's, whose interface is twice as fast a lane (HS-G5 after "
    f"HS-G4). {_PAPER} used a OnePlus Ace 2 with UFS 3.1, and has no figures of its storage",
    "latency_us": {"value": 10.6, "assumed": "twice that of UFS 4.0"},
    "max_depth": {"value": 32, "assumed": "as UFS 4.0"},
    **{part: [_halved(row) for row in _UFS_4_0[part]] for part in ("cores", "random", "sequential")},
}

_NVME: Mapping[str, Any] = {
    "name": "nvme",
    "source": f"{_PAPER}, its comparison of a PC's NVMe with UFS 4.0: 7.5 GB/s, 1,200K random reads/s",
    "latency_us": {"value": 60, "assumed": "a usual figure of flash behind a fast controller"},
    "max_depth": {"value": 1024, "assumed": "usual; the standard allows 65,536 in each of as many queues"},
    "random": [
        {
            "block_bytes": _KB4,
            "range_bytes": _MB512,
            "depth": 256,
            "mb_per_s": 4915.2,
            "from": f"{_PAPER}: 1,200K random reads/s",
            "assumed": "the size (4 KiB), the depth, and that the range does not matter",
        },
        {
            "block_bytes": _KB512,
            "range_bytes": _MB512,
            "depth": 256,
            "mb_per_s": 7500,
            "assumed": "as sequential reads",
        },
    ],
    "sequential": [
        {"block_bytes": _KB4, "depth": 256, "mb_per_s": 4915.2, "assumed": "as random reads"},
        {"block_bytes": _KB512, "depth": 256, "mb_per_s": 7500, "from": _PAPER, "assumed": "the size and the depth"},
    ],
}

PRESETS: Mapping[str, Mapping[str, Any]] = {preset["name"]: preset for preset in (_UFS_4_0, _UFS_3_1, _NVME)}
