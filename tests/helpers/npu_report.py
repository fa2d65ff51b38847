"""``qnn.json`` of a bundle of three layers, the last of which has no hot part."""

from __future__ import annotations

from typing import Any

from torch_pi2.export.qnn.settings import REPORT_FORMAT, REPORT_VERSION

NPU_REPORT: dict[str, Any] = {
    "format": REPORT_FORMAT,
    "version": REPORT_VERSION,
    "soc": "SM8650",
    "precision": "w4a16",
    "qnn": "v2.49.40",
    "layers": [
        {
            "context_bytes": 2048,
            "block": 16,
            "errors": [0.12, 0.1],
            "measured_tokens": 128,
        },
        {
            "context_bytes": 4096,
            "block": 0,
            "errors": [0.21, 0.2],
            "measured_tokens": 128,
        },
        None,
    ],
    "loss": {
        "measured_on": "calibration data after the tokens that hot parts were quantised on",
        "tokens": 508,
        "nats_per_token": 2.0,
        "npu": {"decode_b1": {"nats_per_token": 2.01, "change": 0.005}},
    },
}
