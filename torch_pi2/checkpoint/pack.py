"""``torch_pi2.pack``: writes the neuron store of a folder, or shards of it."""

import hashlib
import json
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch_pi2.base.fields import checked
from torch_pi2.base.files import replacing_folder
from torch_pi2.base.modules import fresh_settings
from torch_pi2.base.package import __version__
from torch_pi2.base.reading import parse, read_bytes
from torch_pi2.checkpoint.quantize import convert, copy_small_files
from torch_pi2.distributed import shard_store
from torch_pi2.errors import ArtifactError, ConfigError, check_choice
from torch_pi2.formats import FLOAT, FLOATS, QUANTIZED
from torch_pi2.store import storefile
from torch_pi2.store.folder import PI2_FOLDER, check_replaceable, check_separate, declare
from torch_pi2.store.parts import PartFiles, Parts, check_predictors
from torch_pi2.store.superblock import MOST_CLUSTER
from torch_pi2.store.trust import remember
from torch_pi2.store.weights import QuantizedWeights
from torch_pi2.store.writer import StoreAssembly, StoreLayer
from torch_pi2.types.plan import LayerPlan, Plan, refuse_custom
from torch_pi2.types.shard import Shard

#: Formats of neurons; ``float`` is the model's own.
WEIGHTS = (*QUANTIZED, FLOAT, *FLOATS)
#: How a model is divided into shards, see :func:`pack`.
BY = ("neurons", "layers")
#: Temporary subfolder with the neurons of a float checkpoint.
_NEURONS = "bundles"


@dataclass
class PackReport:
    """Result of :func:`pack`; ``regions``: bytes by purpose (:meth:`StoreReader.regions`); ``seconds``: wall time."""

    file_bytes: int = 0
    layers: int = 0
    neurons: int = 0
    seconds: float = 0.0
    regions: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@checked
@fresh_settings()
def pack(
    folder_in: str | Path,
    folder_out: str | Path,
    *,
    weights: str | None = None,
    cluster: int | None = None,
    ranks: int = 1,
    shares: Sequence[float] | None = None,
    by: str = BY[0],
    trust_remote_code: bool = False,
    progress: bool = False,
) -> PackReport:
    """Write the neuron store ``pi2/model.pi2`` of a folder, with the folder's other files, to ``folder_out``.

    Numbers change only if ``weights`` asks for it: otherwise a packed model computes what the folder computes. Packing
    takes some ten MB of memory whatever the size; for float checkpoints, at most the FFN of one layer. ``folder_out``
    appears when everything is written; after an error nothing is left.

    Args:
        folder_in: written by :func:`torch_pi2.save`, ``quantize``, ``synthetic`` or ``pack``; or a float checkpoint.
        weights: format of the neurons of a float checkpoint: ``float`` (default; the model's own dtype), or
            ``float32``, ``bfloat16`` or ``float16``, to which neurons of another dtype are rounded while everything
            else stays as it is. ``int4`` or ``int8``: neurons and other linear layers are quantised (lossy). Meanwhile
            neurons are kept beside ``folder_out``. For folders of quantised neurons: None, or their own format.
        cluster: neurons that are read and cached together, a power of two up to 64. Default: 1 if a predictor chooses
            neurons, or an exact gate that the plan knows to fire seldom; otherwise whole layers are read, in clusters
            of some 200 KB, which devices read best (also for budgets of less than the gates of all layers).
        ranks: more than 1 writes shards, each the store of one machine, in folders ``rank-0-of-N`` and so on.
            :func:`torch_pi2.load` reads them in a group of as many processes (docs/DISTRIBUTED.md).
        shares: relative share of the neurons for each machine (default: equal).
        by: ``neurons``: a shard has some neurons of every layer. ``layers``: a shard has consecutive decoder blocks, as
            a stage of a pipeline.
        trust_remote_code: passed to transformers, for float checkpoints with modelling code of their own.

    Raises:
        ConfigError: an invalid setting, or ``folder_in`` is a shard or contains shards. ArtifactError: damage, a full
            disk, another process packs there, or ``folder_out`` holds other files. StaleArtifactError: plan and weights
            do not match. Also whatever :func:`torch_pi2.quantize` raises.
    """
    source, folder = Path(folder_in).resolve(), Path(folder_out).resolve()
    if weights is not None:
        check_choice("pack(weights=...)", weights, WEIGHTS, "Choose one.")
    if cluster is not None and (cluster & (cluster - 1) or not 1 <= cluster <= MOST_CLUSTER):
        expected = f"a power of two from 1 to {MOST_CLUSTER}"
        raise ConfigError("pack(cluster=...)", expected=expected, found=repr(cluster), fix="Leave it out.")
    check_choice("pack(by=...)", by, BY, "Choose one.")
    if ranks == 1 and (shares is not None or by != BY[0]):
        what, found = "pack(shares=...)" if shares is not None else f"pack(by={by!r})", "one machine"
        raise ConfigError(what, expected="ranks with it, more than 1", found=found, fix="Pass ranks, or leave it out.")
    if ranks != 1:
        shard_store.check_ranks(ranks, shares)
    check_separate("pack", source, folder)
    check_replaceable(folder)
    shard_store.refuse_shards(source)
    start = time.perf_counter()
    with replacing_folder(folder) as staging:
        if storefile.weights_path(source / PI2_FOLDER) is None:
            whole = staging / _NEURONS
            convert(source, whole, weights or FLOAT, trust_remote_code=trust_remote_code, progress=progress)
        else:
            whole = source
        with Parts(whole / PI2_FOLDER) as parts, storefile.open_weights(whole / PI2_FOLDER) as reader:
            plan = parts.plan()
            check_predictors(plan, parts.each_predictor(plan.model_hash), source)
            parts.check_stats(plan.model_hash)
            shard_store.refuse_shards(source, parts.shard)
            if reader.channels:
                fix = "Load it in memory (torch_pi2.load without a budget)."
                found, expected = "linear layers by input channel (an InputMethod)", "neurons"
                raise ConfigError(f"pack({source})", expected=expected, found=found, fix=fix)
            reader.check_plan(plan)
            if whole == source:
                known = reader.neuron_formats
                if weights not in (None, known) and (weights, reader.weights) != (FLOAT, FLOAT):
                    expected, fix = f"{known}, as the weights are", "Leave it out, or pack the float checkpoint."
                    raise ConfigError(f"pack({source}, weights=...)", expected=expected, found=repr(weights), fix=fix)
            packer = _Packer(whole, reader, plan, parts.inside, cluster, progress)
            if ranks != 1:
                refuse_custom(plan, f"pack(ranks={ranks})")
            if ranks == 1:
                report = packer.pack(staging)
            elif by == "layers":
                report = packer.pack_shards(staging, shard_store.partition_layers(plan, ranks, shares))
            else:
                report = packer.pack_shards(staging, shard_store.partition_neurons(plan, ranks, shares))
        shutil.rmtree(staging / _NEURONS, ignore_errors=True)
    if trust_remote_code:
        remember(folder)
    report.seconds = time.perf_counter() - start
    return report


@dataclass
class _Packer:
    """Writes the store of the folder ``whole``, or stores of its shards. inside: its plan is in a store."""

    whole: Path
    reader: QuantizedWeights
    plan: Plan
    inside: bool
    cluster: int | None
    progress: bool

    def pack(self, folder: Path, shard: Shard | None = None) -> PackReport:
        """Write the store and the folder's other files into ``folder``."""
        path = folder / PI2_FOLDER / storefile.STORE_FILE
        path.parent.mkdir()
        copy_small_files(self.whole, folder)
        with PartFiles(self.whole / PI2_FOLDER, () if self.inside else None) as beside:
            store = self._assembly(beside, shard)
            out = store.writer(path, progress=self.progress)
            if out.file_bytes > (free := shutil.disk_usage(folder).free):
                expected = f"as many bytes of free space for {folder}"
                fix = "Choose another output folder or free some space; nothing was left half-written."
                what = f"writing {storefile.STORE_FILE} of {out.file_bytes} bytes"
                raise ArtifactError(what, expected=expected, found=f"{free}", fix=fix)
            superblock = store.superblock(out)
            with out:
                store.write(out, superblock)
        declare(folder)
        neurons = sum(layer.site.intermediate for layer in store.layers)
        with storefile.StoreReader(path) as made:
            return PackReport(made.file_bytes, len(store.layers), neurons, regions=made.regions())

    def pack_shards(self, staging: Path, shards: Sequence[Shard]) -> PackReport:
        total = PackReport(layers=len(self.plan.layers))
        for shard in shards:
            folder = staging / shard_store.shard_name(shard.rank, len(shards))
            folder.mkdir()
            report = self.pack(folder, shard)
            total.file_bytes += report.file_bytes
            total.neurons += report.neurons
            total.regions = {name: total.regions.get(name, 0) + size for name, size in report.regions.items()}
        return total

    def _assembly(self, beside: PartFiles, shard: Shard | None) -> StoreAssembly:
        """Raises ArtifactError: neurons are missing. ConfigError: there are none at all."""
        here: Plan = self.plan
        reader: Any = self.reader
        if shard is not None:
            here, reader = shard.plan(self.plan), shard_store.ShardView(self.reader, self.plan, shard)
        if not here.layers:
            fix = "Import its file or checkpoint again with neurons='all' (--neurons all); some models have none."
            raise ConfigError(f"packing {self.whole}", expected="layers of neurons", found="none", fix=fix)
        # a shard and a bundle keep no gates in memory
        gates = shard is None and self.cluster in (None, 1)
        layers = [_layer(layer, reader, gates and layer.gate_decides) for layer in here.layers]
        ours = {name for layer in layers for name in (*layer.tensors, f"{layer.site.key}.gates")}
        ours.add(storefile.SUPERBLOCK)
        ours |= {f"{name}.blocks" for name in self.reader.in_blocks}  # of tied linears; a store has their rows alone
        weights = {n: spec for n, spec in reader.specs.items() if n not in ours and not storefile.PADDING.fullmatch(n)}
        parts = dict(beside.specs)
        if not parts:  # they are in the reader's store
            parts = {n: weights.pop(n) for n in list(weights) if storefile.part_of(n) is not None}
        sites = {"sites": json.dumps({layer.site.key: self.reader.strategy(layer.site.key) for layer in here.layers})}

        def file_of(name: str) -> Any:
            return beside if name in beside.specs else reader

        cluster = 1 if any(layer.apart for layer in layers) else self.cluster
        origin = _provenance(self.whole, self.reader)
        about = reader.metadata | sites
        return StoreAssembly(self.plan, layers, [parts, weights], file_of, about, origin, cluster=cluster, shard=shard)


def _layer(layer: LayerPlan, reader: Any, apart: bool) -> StoreLayer:
    site = layer.site
    reader.read_neurons(site, (0, 0))  # raises if the layer is missing
    kind = reader.format_of(site.key)
    return StoreLayer(site, storefile.hot_neurons(layer), kind, lambda *rows: reader.read_neurons(site, rows), apart)


def _provenance(source: Path, reader: QuantizedWeights) -> str:
    """Origin of a store as JSON, the same for each packing."""
    origin: dict[str, Any] = {}
    if isinstance(reader, storefile.StoreReader):
        model = reader.provenance().get("model")
        origin |= model if isinstance(model, dict) else {}
    config = source / "config.json"
    if not origin and config.is_file():
        text = read_bytes(config)  # raises if it cannot be read
        origin["config_sha256"] = hashlib.sha256(text).hexdigest()
        with suppress(ArtifactError):
            about = parse(text, config)
            known = about if isinstance(about, dict) else {}
            origin |= {name: known[name] for name in ("model_type", "architectures") if name in known}
    about_us = {"torch_pi2": __version__, "from": reader.file_format}
    return json.dumps(about_us | {"weights": reader.neuron_formats, "model": origin})
