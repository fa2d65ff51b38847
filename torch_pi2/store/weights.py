"""``pi2/weights.safetensors``: the weights of a quantised model, in the layout of the kernels.

Names (docs/FORMATS.md): quantised linears are uint8 rows ``NAME.weight``; neurons are ``KEY.bundles`` in plan order;
floats have their usual names. While a float model is packed, it has float neurons here and nothing quantised.
"""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NoReturn

import torch
from torch import nn

from torch_pi2.base.dtypes import DTYPES
from torch_pi2.base.fields import Field
from torch_pi2.base.reading import parse
from torch_pi2.base.tensorfile import Spec, TensorReader
from torch_pi2.errors import ArtifactError, ConfigError, check_made_from
from torch_pi2.formats import FLOAT, FLOATS, FORMATS, PAIRS, QUANTIZED, ROWS, neuron_shape, row_bytes
from torch_pi2.ops.linear import ROWS as BLOCK_ROWS
from torch_pi2.ops.linear import fits, from_blocks
from torch_pi2.types.plan import Plan
from torch_pi2.types.site import MOST_SIZE, FFNSite

WEIGHTS_FILE = "weights.safetensors"
WEIGHTS_VERSION = "1"
#: Version of files with matrices in several formats, or with a quantised embedding.
MIXED_VERSION = "2"
#: Version of files with neurons in another format than ``weights``, or in two formats.
PAIRS_VERSION = "3"
FORMAT = "torch_pi2.weights"
#: Version of files with linear layers in blocks, as this machine's kernels read them.
BLOCKS_VERSION = "4"
#: Version of files with linear layers by input channel.
CHANNELS_VERSION = "5"
#: How a layer's modules are replaced (:mod:`torch_pi2.rewrite.rewrite`).
STRATEGIES = ("owner", "chain", "lazy")
#: Metadata key of the linears in blocks.
BLOCKS = "blocks"
NO_FORMATS: Mapping[str, str] = {}
NO_EMBEDDINGS: Mapping[str, int] = {}


def metadata(
    kind: str,
    model_hash: str,
    linears: Mapping[str, int],
    strategies: Mapping[str, str],
    *,
    formats: Mapping[str, str] = NO_FORMATS,
    embeddings: Mapping[str, int] = NO_EMBEDDINGS,
    in_blocks: Collection[str] = (),
    channels: Mapping[str, int] = NO_EMBEDDINGS,
) -> dict[str, str]:
    """The metadata of a weights file.

    Args:
        kind: the main format. model_hash: the plan's. strategies: site key -> one of ``STRATEGIES``.
        linears: module name of every quantised linear -> its number of inputs.
        formats: exceptions from ``kind``, by module name of linears and embeddings and by site key of neurons.
        embeddings: module name of every quantised embedding -> its width. in_blocks: linears whose rows are in blocks.
        channels: module name of every linear whose weight lies by input channel -> its number of outputs.
    """
    made = {"format": "pt", "pi2_format": FORMAT, "pi2_version": WEIGHTS_VERSION, "weights": kind}
    made |= {"model_hash": model_hash, "linears": json.dumps(dict(linears)), "sites": json.dumps(dict(strategies))}
    if formats or embeddings:
        made["pi2_version"] = PAIRS_VERSION if any(key in strategies for key in formats) else MIXED_VERSION
        made |= {"formats": json.dumps(dict(formats)), "embeddings": json.dumps(dict(embeddings))}
    if in_blocks:
        made |= {"pi2_version": BLOCKS_VERSION, BLOCKS: json.dumps(list(in_blocks))}
    if channels:
        made |= {"pi2_version": CHANNELS_VERSION, "channels": json.dumps(dict(channels))}
    return made


def neuron_specs(site: FFNSite, kind: str) -> dict[str, Spec]:
    """Tensors of one feed-forward layer: neurons as bytes, and biases, in float32 if the neurons are quantised."""
    shape = (site.intermediate, *neuron_shape(kind, site.rows_per_neuron, site.hidden))
    specs = {f"{site.key}.bundles": Spec(shape, torch.uint8)}
    n = site.intermediate
    for name, ref, size in (("gate", site.gate, n), ("up", site.up, n), ("down", site.down, site.hidden)):
        if ref is not None and ref.bias is not None:
            specs[f"{site.key}.bias_{name}"] = Spec((size,), DTYPES.get(kind, torch.float32))
    return specs


class QuantizedWeights(TensorReader):
    """An open weights file, or a neuron store (:mod:`torch_pi2.store.storefile`).

    Attributes:
        file_format, file_versions: accepted format and versions in the metadata.
        kind: the main format, see :meth:`format_of`. weights: its name for operators. model_hash: the plan's.
        linears: module name -> number of inputs. strategies: site key -> one of ``STRATEGIES``.
        embeddings: module name -> width, of quantised ones. in_blocks: linears whose rows are in blocks of 16
            (:mod:`torch_pi2.ops.linear`). channels: module name -> number of outputs, of linears by input channel.
    """

    file_format: str = FORMAT
    file_versions: tuple[str, ...] = (
        *(WEIGHTS_VERSION, MIXED_VERSION, PAIRS_VERSION, BLOCKS_VERSION, CHANNELS_VERSION),
    )
    #: The versions that may list formats of neurons, and linears in blocks.
    pairs_versions: tuple[str, ...] = (PAIRS_VERSION, BLOCKS_VERSION, CHANNELS_VERSION)
    blocks_versions: tuple[str, ...] = (BLOCKS_VERSION,)

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        with self.opening():
            self._parse()

    def _parse(self) -> None:
        meta = self.metadata
        found, version = meta.get("pi2_format"), meta.get("pi2_version")
        if found != self.file_format or version not in self.file_versions:
            wanted = f"{self.file_format} version {' or '.join(self.file_versions)}"
            self._refuse(wanted, f"{found} version {version}")
        self.kind = meta.get("weights", "")
        if self.kind not in (*QUANTIZED, *FLOATS):
            self._refuse(f"weights {' or '.join((*QUANTIZED, *FLOATS))}", repr(self.kind))
        self.weights = FORMATS[self.kind].operand
        self.model_hash = meta.get("model_hash", "")
        linears, sites = (self._json(name) for name in ("linears", "sites"))
        self.linears = {name: columns.whole(1, MOST_SIZE) for name, columns in linears.each().items()}
        self.strategies = {key: way.text(STRATEGIES) for key, way in sites.each().items()}
        formats, embeddings = (self._json(name, "{}") for name in ("formats", "embeddings"))
        in_pairs = (*QUANTIZED, *PAIRS)
        self._formats = {n: one.text(in_pairs if n in self.strategies else ROWS) for n, one in formats.each().items()}
        of_neurons = next((name for name in self._formats if name in self.strategies), None)
        if version not in self.pairs_versions and of_neurons is not None:
            formats.wrong(f"linear layers and embeddings alone, in version {version}", of_neurons)
        self.embeddings = {name: width.whole(1, MOST_SIZE) for name, width in embeddings.each().items()}
        blocks = self._json(BLOCKS, "[]")
        self.in_blocks = {one.text(self.linears) for one in blocks.items()}
        if self.in_blocks and version not in self.blocks_versions:
            blocks.wrong(f"none, in version {version}", f"{len(self.in_blocks)}")
        channels = self._json("channels", "{}")
        self.channels = {name: outputs.whole(1, MOST_SIZE) for name, outputs in channels.each().items()}
        if self.channels and version != CHANNELS_VERSION:
            channels.wrong(f"none, in version {version}", f"{len(self.channels)}")
        if self.linears and self.weights == "float":
            linears.wrong(f"none, in a file of {self.kind}", f"{len(self.linears)}")
        if self._formats and self.weights == FLOAT:
            formats.wrong(f"none, in a file of {self.kind}", f"{len(self._formats)}")

    def _json(self, name: str, default: str = "") -> Field:
        """JSON in the metadata under ``name``. Raises ArtifactError: missing or invalid."""
        where, fix = f"{self.path}, {name}", "Use the torch_pi2 that wrote it, or make it again."
        return Field(parse(self.metadata.get(name, default), where, fix=fix), where, fix)

    def format_of(self, name: str) -> str:
        """Format of the rows of a linear or an embedding, or of the neurons of a site (possibly a pair)."""
        return self._formats.get(name, self.kind)

    def operand_of(self, key: str) -> str:
        """Format name of the neurons of site ``key`` in operators."""
        return FLOAT if self.weights == FLOAT else self.format_of(key)

    @property
    def neuron_formats(self) -> str:
        """Formats of all layers, for display; ``kind`` in a file without neurons."""
        return ", ".join(dict.fromkeys(self.format_of(key) for key in self.strategies)) or self.kind

    def rows_name(self, name: str) -> str:
        """The tensor with the rows of linear ``name``: its own, or that of the embedding it is tied to."""
        own = f"{name}.weight"
        if own in self.specs or not self.embeddings:
            return own
        return f"{next(iter(self.embeddings))}.weight"

    def read_bytes(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Bytes ``[start, stop)`` of tensor ``name``, uint8; of rows in blocks as they are in row order."""
        linear, spec = name.removesuffix(".weight"), self.spec(name)
        if linear not in self.in_blocks or linear == name:
            return super().read_bytes(name, start, stop)
        row = spec.nbytes // spec.shape[0]
        first, last = start // row // BLOCK_ROWS * BLOCK_ROWS, -(-stop // row // BLOCK_ROWS) * BLOCK_ROWS
        rows = from_blocks(self.read(name, (first, last)), self.format_of(linear), self.linears[linear])
        return rows.view(-1)[start - first * row : stop - first * row]

    def blocks_name(self, name: str) -> str:
        """The tensor with the rows of linear ``name`` in blocks: its own, or ``.blocks`` if it is tied to a table."""
        own = f"{name}.weight"
        return own if own in self.specs else f"{name}.blocks"

    def _refuse(self, expected: str, found: str) -> NoReturn:
        fix = "Use the torch_pi2 that wrote it, or make it again."
        raise ArtifactError(str(self.path), expected=expected, found=found, fix=fix)

    def check_hash(self, model_hash: str) -> None:
        """Raises StaleArtifactError: the plan is for other weights."""
        fix = "The two are from different models; make the folder again."
        check_made_from(str(self.path), self.model_hash, model_hash, "weights as in plan.json,", fix)

    def check_activations(self, int8_activations: bool) -> None:
        """Raises ConfigError: int8 activations with float weights."""
        if int8_activations and self.weights == "float":
            found, fix = "'int8'", "Pack the float checkpoint with weights='int8' or 'int4'."
            expected = f"float, as the weights are {self.kind}"
            raise ConfigError(f"activations for {self.path}", expected=expected, found=found, fix=fix)

    def check_plan(self, plan: Plan) -> None:
        """Raises StaleArtifactError: the neurons are in another order than in ``plan``, as far as the file says."""
        self.check_hash(plan.model_hash)

    def read_neurons(self, site: FFNSite, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """Neurons (``rows``: from, to) in plan order: uint8 ``[I, R, row bytes]``; of two formats ``[I, bytes]``."""
        name = f"{site.key}.bundles"
        self.check(name, neuron_specs(site, self.format_of(site.key))[name])
        return self.read(name, rows)

    def as_computed(self, neuron_rows: torch.Tensor) -> torch.Tensor:
        """uint8 neurons in the operators' dtype: floats ``[..., H]`` in float files."""
        return neuron_rows.view(DTYPES[self.kind]) if self.kind in FLOATS else neuron_rows

    def take(self, name: str, spec: Spec) -> torch.Tensor:
        """Tensor ``name``, which must match ``spec``. Raises ArtifactError."""
        self.check(name, spec)
        return self.read(name)

    def check(self, name: str, spec: Spec) -> None:
        """Raises ArtifactError: tensor ``name`` is missing or does not match ``spec``."""
        if self.spec(name) != spec:
            self._refuse(f"{name} as {spec}", str(self.spec(name)))

    def read_like(self, name: str, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """Tensor ``name``, in ``dtype`` if it is float, or None if the file has none."""
        if name not in self.specs:
            return None
        spec = self.specs[name]
        if spec.shape != tuple(like.shape) or spec.dtype.is_floating_point != like.is_floating_point():
            self._refuse(f"{name} as {Spec.of(like)}", str(spec))
        value = self.read(name)
        return value.to(dtype) if value.is_floating_point() else value

    def strategy(self, key: str) -> str:
        """Strategy of a layer. Raises ArtifactError: the file does not have the layer."""
        if key not in self.strategies:
            self._refuse(f"a site {key}", f"{len(self.strategies)} others")
        return self.strategies[key]

    def check_linears(self, model: nn.Module) -> None:
        """Raises ArtifactError: linears or embeddings do not match those of ``model``."""
        modules = dict(model.named_modules(remove_duplicate=False))
        for name, columns in self.linears.items():
            linear = modules.get(name, nn.Identity())
            if not isinstance(linear, nn.Linear) or linear.in_features != columns:
                found = getattr(linear, "in_features", f"a {type(linear).__name__}")
                self._refuse(f"linear layers of the model, {name} with {columns} inputs", str(found))
            if name in self.in_blocks and not fits(linear.out_features, columns):
                self._refuse(f"{name} in row order, as its rows do not fit blocks", BLOCKS)
            rows = Spec((linear.out_features, row_bytes(self.format_of(name), columns)), torch.uint8)
            self.check(self.rows_name(name), rows)
            if name in self.in_blocks:
                self.check(self.blocks_name(name), rows)
        for name, outputs in self.channels.items():
            linear = modules.get(name, nn.Identity())
            if not isinstance(linear, nn.Linear) or linear.out_features != outputs:
                found = getattr(linear, "out_features", type(linear).__name__)
                self._refuse(f"linear layers of the model, {name} with {outputs} outputs", str(found))
            width = outputs if self.weights == FLOAT else row_bytes(self.kind, outputs)
            dtype = DTYPES[self.kind] if self.weights == FLOAT else torch.uint8
            self.check(f"{name}.channels", Spec((linear.in_features, width), dtype))
        for name, width in self.embeddings.items():
            found = modules.get(name)
            if not isinstance(found, nn.Embedding) or found.embedding_dim != width:
                self._refuse(f"embeddings of the model, {name} of {width} numbers a token", f"a {type(found).__name__}")
            rows = Spec((found.num_embeddings, row_bytes(self.format_of(name), width)), torch.uint8)
            self.check(f"{name}.weight", rows)

    @property
    def float_dtype(self) -> torch.dtype | None:
        """The dtype of most floats in the file, not counting float32 biases; None if there are none."""
        rows = {f"{name}.bias" for name in (*self.linears, *self.channels)}
        found: dict[torch.dtype, int] = {}
        for name, spec in self.specs.items():
            ours = name in rows or name.rpartition(".bias_")[0] in self.strategies or name.startswith("pi2.")
            if spec.dtype.is_floating_point and not ours:
                found[spec.dtype] = found.get(spec.dtype, 0) + spec.nbytes
        return max(found, key=lambda dtype: found[dtype], default=None)
