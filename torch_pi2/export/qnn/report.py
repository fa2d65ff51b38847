"""``qnn.json`` of a bundle: what the compiler said of the hot parts, and what they lose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch_pi2.base.fields import Field
from torch_pi2.base.files import parse_json, read_text

FILE = "qnn.json"
FORMAT, VERSION = "torch_pi2.qnn", 1


def read(path: Path) -> dict[str, Any]:
    """The report at ``path``, of which is known what is shown of it: versions, layers and loss.

    Raises:
        ArtifactError: it is missing, damaged, or no such report.
    """
    data = parse_json(read_text(path), path, FORMAT, VERSION)
    fields = Field(data, str(path), "Export the bundle again.")
    for name in ("soc", "precision", "qnn"):
        fields.at(name).text()
    for layer in fields.at("layers").items():
        if layer.value is not None:
            _check_layer(layer)
    if "parts" in data:
        for part in fields.at("parts").each().values():
            part.at("context_bytes").whole()
            part.at("block").whole()
            for error in part.at("errors").items():
                error.number()
    if (loss := fields.at("loss")).value is not None:
        loss.at("measured_on").text()
        loss.at("tokens").whole(1)
        loss.at("nats_per_token").number()
        for method in loss.at("npu").each().values():
            method.at("nats_per_token").number()
            method.at("change").number(-1)
    return data


def _check_layer(layer: Field) -> None:
    for name in ("context_bytes", "block", "measured_tokens"):
        layer.at(name).whole()
    for count in layer.at("outliers").items(1):
        count.whole()
    for error in layer.at("errors").items():
        error.number()
    for tried in layer.at("tried").items():
        tried.at("block").whole()
        tried.at("error").number()
