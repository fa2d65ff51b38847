"""``pi2/weights.safetensors``: the weights of a quantised model, in the form in which they are computed with.

Names (docs/FORMATS.md): quantised linears under their usual ``NAME.weight`` as uint8 rows; the bundles of a
feed-forward layer as ``KEY.bundles`` in plan order; everything that stays float under its usual name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import torch

from torch_pi2.errors import ArtifactError, StaleArtifactError
from torch_pi2.graph.sites import FFNSite
from torch_pi2.ops.rows import row_bytes
from torch_pi2.store.tensorfile import Spec, TensorReader

WEIGHTS_FILE = "weights.safetensors"
WEIGHTS_VERSION = "1"
FORMAT = "torch_pi2.weights"
#: Formats of quantised weights.
KINDS = ("int4", "int8")
#: How a layer's modules are replaced: see :mod:`torch_pi2.graph.rewrite`. The third way needs weights to be tried with.
WAYS = ("owner", "chain")


def metadata(kind: str, model_hash: str, linears: Mapping[str, int], ways: Mapping[str, str]) -> dict[str, str]:
    """The metadata of a weights file.

    Args:
        kind: one of ``KINDS``.
        model_hash: the plan's.
        linears: module name of every quantised linear -> its number of inputs.
        ways: site key -> one of ``WAYS``.
    """
    return {
        "format": "pt",
        "pi2_format": FORMAT,
        "pi2_version": WEIGHTS_VERSION,
        "weights": kind,
        "model_hash": model_hash,
        "linears": json.dumps(dict(linears)),
        "sites": json.dumps(dict(ways)),
    }


def bundle_specs(site: FFNSite, kind: str) -> dict[str, Spec]:
    """Tensors of one feed-forward layer: its bundles, and float32 biases where it has them."""
    specs = {
        f"{site.key}.bundles": Spec(
            (site.intermediate, site.rows_per_neuron, row_bytes(kind, site.hidden)), torch.uint8
        )
    }
    for name, ref, size in (
        ("gate", site.gate, site.intermediate),
        ("up", site.up, site.intermediate),
        ("down", site.down, site.hidden),
    ):
        if ref is not None and ref.bias is not None:
            specs[f"{site.key}.bias_{name}"] = Spec((size,), torch.float32)
    return specs


class QuantizedWeights(TensorReader):
    """A weights file, open.

    Attributes:
        kind: one of ``KINDS``.
        model_hash: of the plan that belongs to it.
        linears: module name -> number of inputs. ways: site key -> one of ``WAYS``.

    Raises:
        ArtifactError: missing, damaged, of another format or version, or of weights of an unknown kind.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        try:
            self._read_metadata()
        except BaseException:
            self.close()
            raise

    def _read_metadata(self) -> None:
        meta = self.metadata
        if meta.get("pi2_format") != FORMAT or meta.get("pi2_version") != WEIGHTS_VERSION:
            self._refuse(
                f"{FORMAT} version {WEIGHTS_VERSION}", f"{meta.get('pi2_format')} version {meta.get('pi2_version')}"
            )
        self.kind = meta.get("weights", "")
        if self.kind not in KINDS:
            self._refuse(f"weights {' or '.join(KINDS)}", repr(self.kind))
        self.model_hash = meta.get("model_hash", "")
        try:
            self.linears: dict[str, int] = dict(json.loads(meta["linears"]))
            self.ways: dict[str, str] = dict(json.loads(meta["sites"]))
            for name, columns in self.linears.items():
                if type(columns) is not int or columns < 1:
                    raise ValueError(f"{columns!r} inputs of {name}")
            if not set(self.ways.values()) <= set(WAYS):
                raise ValueError(f"ways {sorted(set(map(str, self.ways.values())))}")
        except (KeyError, TypeError, ValueError) as error:
            self._refuse("its linears and sites", f"damage ({type(error).__name__}: {error})")

    def _refuse(self, expected: str, found: str) -> NoReturn:
        raise ArtifactError(
            str(self.path), expected=expected, found=found, fix="Use the torch_pi2 that wrote it, or make it again."
        )

    def check_hash(self, model_hash: str) -> None:
        """Raises StaleArtifactError if the plan is of other weights."""
        if self.model_hash != model_hash:
            raise StaleArtifactError(
                str(self.path),
                expected=f"weights {model_hash[:12]} as in plan.json",
                found=self.model_hash[:12] or "none",
                fix="The two are from different models; make the folder again.",
            )

    def take(self, name: str, spec: Spec) -> torch.Tensor:
        """Tensor ``name``, which must be as in ``spec``. Raises ArtifactError."""
        if self.spec(name) != spec:
            self._refuse(f"{name} as {spec}", str(self.spec(name)))
        return self.read(name)
