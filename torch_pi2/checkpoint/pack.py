"""``torch_pi2.pack``: writes the neuron store of a folder, in steps that a later call can resume."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from torch_pi2.base.arguments import checked
from torch_pi2.base.evaluating import fresh_settings
from torch_pi2.base.files import atomic_write, replacing_folder
from torch_pi2.base.reading import parse, read_bytes
from torch_pi2.base.tensorfile import Spec, TensorWriter
from torch_pi2.base.version import __version__
from torch_pi2.checkpoint.card import keep_card
from torch_pi2.checkpoint.quantize import copy_small_files, float_neurons, quantize, small_files
from torch_pi2.distributed.partition import check_ranks, partition_layers, partition_neurons
from torch_pi2.distributed.shard_store import JoinedShards, ShardView, refuse_shard, shard_name, shards_in
from torch_pi2.errors import ArtifactError, ConfigError, check_choice
from torch_pi2.formats import FLOAT, FLOATS, QUANTIZED
from torch_pi2.store.folder import PI2_FOLDER, check_replaceable, check_separate, declare
from torch_pi2.store.parts import PartFiles, Parts, check_predictors
from torch_pi2.store.storefile import (
    PADDING,
    STORE_FILE,
    SUPERBLOCK,
    StoreReader,
    hot_neurons,
    open_weights,
    part_of,
    weights_path,
)
from torch_pi2.store.superblock import MOST_CLUSTER, SECTOR
from torch_pi2.store.trust import remember
from torch_pi2.store.writer import StoreAssembly, StoreLayer
from torch_pi2.types.plan import LayerPlan, Plan
from torch_pi2.types.shard import Shard

#: Formats of neurons; ``float``: the model's own, nothing is rounded.
WEIGHTS = (*QUANTIZED, FLOAT, *FLOATS)
#: What of a model one machine's shard has, see :func:`pack`.
BY = ("neurons", "layers")
#: Written data is put on disk and recorded after so many bytes: at most as many are written again after a kill.
_RECORD = 64 << 20
_PROGRESS, _PARTIAL, _NEURONS = "progress.json", f".{STORE_FILE}.partial", "bundles"
#: Suffix of a file beside a finished shard, while other shards are being written.
_DONE = ".done"


@dataclass
class PackReport:
    """What :func:`pack` did.

    Attributes:
        file_bytes: size of the store. bytes_written: by this call; fewer if it went on with an earlier one.
        layers, neurons: in the store. resumed_layers: of them written by an earlier call. seconds: wall time.
        regions: bytes of the file by what they are for (see :meth:`StoreReader.regions`).
    """

    file_bytes: int = 0
    bytes_written: int = 0
    layers: int = 0
    neurons: int = 0
    resumed_layers: int = 0
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
    slot_align: int | None = None,
    cluster: int | None = None,
    ranks: int = 1,
    shares: Sequence[float] | None = None,
    by: str = BY[0],
    trust_remote_code: bool = False,
    progress: bool = False,
) -> PackReport:
    """Write the neuron store ``pi2/model.pi2`` of a folder, and everything else of it, to ``folder_out``.

    No number is changed, unless ``weights`` says so: a packed model computes what the folder computes. It takes some
    ten MB of memory whatever the size; for float checkpoints a layer's FFN at most. ``folder_out`` appears when
    everything is written. A process that is killed or interrupted leaves ``.NAME.partial`` beside it, and the same call
    resumes there if the source file (size, time and hash) and the settings are the same; otherwise it starts again, as
    does every other call that writes ``folder_out``. After an error nothing is left.

    Args:
        folder_in: written by :func:`torch_pi2.save`, ``quantize``, ``synthetic`` or ``pack``; or a float checkpoint. A
            folder of shards must have all of them; they become one store again, or as many shards as ``ranks``.
        weights: format of the neurons of a float checkpoint: ``float`` (default; the model's own dtype), or
            ``float32``, ``bfloat16`` or ``float16``, to which neurons of another dtype are rounded; everything else
            stays as it is. ``int4`` or ``int8``: neurons and other linear layers are quantised (lossy). Neurons are
            kept in ``.NAME.partial`` meanwhile. For folders of quantised neurons: None, or their own format.
        slot_align: bytes from one neuron to the next are a multiple of it, a power of two from 512 to 65536 (default:
            4096, the page that a device reads; 512 for smaller neurons).
        cluster: neurons that are read and cached together, a power of two up to 64. Default: 1 if a predictor chooses
            neurons; else all of a layer are wanted, and clusters have some 200 KB, which devices read best.
        ranks: more than 1 writes shards, each the store of one machine, in folders ``rank-0-of-N`` and so on, which
            :func:`torch_pi2.load` takes in a group of as many processes (docs/DISTRIBUTED.md).
        shares: of the neurons, for each machine, in any unit (default: equal).
        by: what a shard has: ``neurons``, some of every layer; or ``layers``, all neurons of some consecutive decoder
            blocks and nothing of the others (stages of a pipeline).
        trust_remote_code: passed to transformers, for float checkpoints with modelling code of their own.

    Raises:
        ConfigError: a setting makes no sense. ArtifactError: something is damaged, the disk is full, another process
            packs there, or ``folder_out`` holds other files. StaleArtifactError: plan and weights do not belong
            together. Whatever :func:`torch_pi2.quantize` raises.
    """
    source, folder = Path(folder_in).resolve(), Path(folder_out).resolve()
    _check(weights, slot_align, cluster)
    check_choice("pack(by=...)", by, BY, "Choose one.")
    if ranks == 1 and (shares is not None or by != BY[0]):
        raise ConfigError(
            "pack(shares=...)" if shares is not None else f"pack(by={by!r})",
            expected="ranks with it, more than 1",
            found="one machine",
            fix="Pass ranks, or leave it out.",
        )
    if ranks != 1:
        check_ranks(ranks, shares)
    check_separate("pack", source, folder)
    check_replaceable(folder)
    start = time.perf_counter()
    with replacing_folder(folder, keep=True) as staging:
        keep_card(folder, staging)
        neurons = None
        shards = shards_in(source)
        if weights_path(source / PI2_FOLDER) is None and not shards:
            neurons = _as_neurons(source, staging / _NEURONS, weights or FLOAT, trust_remote_code, progress)
        with _opened(neurons or source, None if neurons else weights, shards) as whole:
            packer = _Packer(whole, slot_align, cluster, progress)
            if ranks == 1:
                report = packer.pack(staging)
            elif by == "layers":
                report = packer.pack_shards(staging, partition_layers(whole.plan, ranks, shares))
            else:
                report = packer.pack_shards(staging, partition_neurons(whole.plan, ranks, shares, whole.parts.stats()))
        _remove(staging / _NEURONS)
    if trust_remote_code:
        remember(folder)
    report.seconds = time.perf_counter() - start
    return report


def _check(weights: str | None, slot_align: int | None, cluster: int | None) -> None:
    if weights is not None:
        check_choice("pack(weights=...)", weights, WEIGHTS, "Choose one.")
    for name, value, least, most, fix in (
        ("slot_align", slot_align, SECTOR, 65536, "Leave it out, or take the block size of the device."),
        ("cluster", cluster, 1, MOST_CLUSTER, "Leave it out."),
    ):
        if value is not None and (value & (value - 1) or not least <= value <= most):
            expected = f"a power of two from {least} to {most}"
            raise ConfigError(f"pack({name}=...)", expected=expected, found=repr(value), fix=fix)


def _as_neurons(source: Path, made: Path, weights: str, trust_remote_code: bool, progress: bool) -> Path:
    """Folder ``made``, with the neurons of the float checkpoint ``source``; one that a killed call left is reused."""
    make = quantize if weights in QUANTIZED else float_neurons
    about, marker = _source_marker(source, weights), made / PI2_FOLDER / "source.json"
    if not marker.is_file() or marker.read_text() != about:
        _remove(made)
        make(source, made, weights, trust_remote_code=trust_remote_code, progress=progress)
        atomic_write(marker, about)
    return made


def _source_marker(source: Path, weights: str) -> str:
    """Identifies what neurons are made of: every file that is read or copied, and our version."""
    weight_files = [p for pattern in ("*.safetensors", "*.index.json") for p in source.glob(pattern)]
    plan = [p for p in (source / PI2_FOLDER).glob("*") if p.is_file()]
    files = sorted((*weight_files, *small_files(source), *plan))
    stamps = [(str(p.relative_to(source)), p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    return json.dumps([__version__, weights, str(source), stamps])


@dataclass
class _Whole:
    """The model that is packed.

    Attributes:
        folder: with its small files. sources: files with its weights. reader: :class:`QuantizedWeights`, or
            :class:`JoinedShards` for shards. beside: plan, predictors and statistics in files of their own.
    """

    folder: Path
    sources: list[Path]
    reader: Any
    beside: PartFiles
    parts: Parts
    plan: Plan


@contextmanager
def _opened(source: Path, weights: str | None, shards: dict[int, Path]) -> Iterator[_Whole]:
    """The folder ``source``, or that of ``shards``.

    Raises:
        ConfigError: its neurons are not ``weights``. ArtifactError, StaleArtifactError: predictors or statistics do not
            belong to the plan.
    """
    folder = next(iter(shards.values()), source)
    pi2 = folder / PI2_FOLDER
    with Parts(pi2) as parts:
        plan, inside = parts.plan(), parts.inside
        check_predictors(plan, parts.each_predictor(plan.model_hash), source)
        parts.check_stats(plan.model_hash)
        whole: Any = JoinedShards(source, shards) if shards else open_weights(pi2)
        with whole as reader, PartFiles(pi2, () if inside else None) as beside:
            known = reader.neuron_formats
            if weights not in (None, known) and (weights, reader.weights) != (FLOAT, FLOAT):
                raise ConfigError(
                    f"pack({source}, weights=...)",
                    expected=f"{known}, as the weights are",
                    found=repr(weights),
                    fix="Leave it out, or pack the float checkpoint.",
                )
            if not shards:
                refuse_shard(reader)
                reader.check_plan(plan)
            sources = [*(whole.sources if shards else [reader.path]), *beside.paths]
            yield _Whole(folder, sources, reader, beside, parts, plan)


def _remove(path: Path) -> None:
    """A file or folder in the staging folder, if it is there. Raises OSError."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _identity(contents: bytes, sources: Sequence[Path]) -> str:
    """Of ``contents`` and the source files, by their sizes and times."""
    digest = hashlib.sha256(contents)
    for source in sources:
        about = source.stat()
        digest.update(json.dumps([str(source), about.st_size, about.st_mtime_ns]).encode())
    return digest.hexdigest()


class _Packer:
    """Writes the store of ``whole``, or stores of its shards."""

    def __init__(self, whole: _Whole, slot_align: int | None, cluster: int | None, progress: bool) -> None:
        self._whole, self._align, self._cluster, self._progress = whole, slot_align, cluster, progress

    def pack(self, staging: Path, shard: Shard | None = None) -> PackReport:
        """Write the store, and everything else of the folder, into ``staging``."""
        whole = self._whole
        store = self._assembly(shard)
        for path in staging.iterdir():
            if path.name not in (_PROGRESS, _PARTIAL) and path != whole.folder:
                _remove(path)
        (staging / PI2_FOLDER).mkdir()
        copy_small_files(whole.folder, staging)
        report = self._write(store, staging)
        with StoreReader(staging / PI2_FOLDER / STORE_FILE) as made:
            report.file_bytes, report.regions = made.file_bytes, made.regions()
        declare(staging)
        _remove(staging / _PROGRESS)
        return report

    def pack_shards(self, staging: Path, shards: Sequence[Shard]) -> PackReport:
        """A folder for each of ``shards``; those that an earlier call has finished are kept."""
        whole, ranks = self._whole, len(shards)
        total = PackReport(layers=len(whole.plan.layers))
        source = _identity(__version__.encode(), [*whole.sources, *small_files(whole.folder)])
        for shard in shards:
            folder = staging / shard_name(shard.rank, ranks)
            done = folder.with_suffix(_DONE)
            about = json.dumps([source, shard.to_json(), self._align, self._cluster])
            if not done.is_file() or done.read_text() != about:
                folder.mkdir(exist_ok=True)
                _remove(done)  # before anything else of the shard changes
                report = self.pack(folder, shard)
                atomic_write(done, about)
                total.bytes_written += report.bytes_written
                total.resumed_layers += report.resumed_layers
            else:
                total.resumed_layers += len(shard.plan(whole.plan).layers) if shard.by_layers else total.layers
            with StoreReader(folder / PI2_FOLDER / STORE_FILE) as made:
                total.file_bytes += made.file_bytes
                total.neurons += sum(entry.neurons for entry in made.entries)
                total.regions = {name: total.regions.get(name, 0) + size for name, size in made.regions().items()}
        names = {shard_name(rank, ranks) for rank in range(ranks)}
        for path in staging.iterdir():
            if path.name not in names:
                _remove(path)
        return total

    def _assembly(self, shard: Shard | None) -> StoreAssembly:
        """Raises ArtifactError: neurons are missing. ConfigError: there are none at all."""
        whole, beside = self._whole, self._whole.beside
        here, reader = whole.plan, whole.reader
        if shard is not None:
            here, reader = shard.plan(whole.plan), ShardView(whole.reader, whole.plan, shard)
        if not here.layers:
            raise ConfigError(
                f"packing {whole.reader.path.parent.parent}",
                expected="layers of neurons",
                found="none",
                fix="Import its file or checkpoint again, with neurons='all' (--neurons all).",
            )
        layers = [self._layer(layer, reader) for layer in here.layers]
        ours = {name for layer in layers for name in layer.tensors} | {SUPERBLOCK}
        weights = {n: spec for n, spec in reader.specs.items() if n not in ours and not PADDING.fullmatch(n)}
        parts = dict(beside.specs)
        if not parts:  # the reader has them
            parts = {n: weights.pop(n) for n in list(weights) if part_of(n) is not None}
        sites = {"sites": json.dumps({layer.site.key: whole.reader.strategy(layer.site.key) for layer in here.layers})}
        return StoreAssembly(
            whole.plan,
            layers,
            [parts, weights],
            lambda name: beside if name in beside.specs else reader,
            reader.metadata | sites,
            _provenance(whole.folder, whole.reader),
            cluster=self._cluster,
            align=self._align,
            shard=shard,
        )

    @staticmethod
    def _layer(layer: LayerPlan, reader: Any) -> StoreLayer:
        site = layer.site
        reader.read_neurons(site, (0, 0))  # raises for what is not there
        kind = reader.format_of(site.key)
        return StoreLayer(site, hot_neurons(layer), kind, lambda *rows: reader.read_neurons(site, rows))

    def _write(self, store: StoreAssembly, staging: Path) -> PackReport:
        """Write ``store`` into ``staging``, where an earlier call may have begun it."""
        partial = staging / _PARTIAL
        writer = _Writer(staging / PI2_FOLDER / STORE_FILE, partial, store.specs, store.metadata, self._progress)
        superblock = store.superblock(writer)
        identity = writer.identity(superblock.pack(), self._whole.sources)
        done, checks = _progress(staging, identity, writer.file_bytes)
        if not done:
            for path in (staging / _PROGRESS, partial):  # in this order: what is recorded must be there
                path.unlink(missing_ok=True)
        writer.check_space()
        neurons = sum(layer.site.intermediate for layer in store.layers)
        report = PackReport(layers=len(store.layers), neurons=neurons, resumed_layers=min(done, len(store.layers)))
        recorded = 0

        def record(count: int, checks: Mapping[str, str]) -> None:
            nonlocal recorded
            if writer.written - recorded >= _RECORD:
                writer.sync()  # what is recorded is on disk after a kill
                about = {"identity": identity, "done": count, "checks": dict(checks)}
                atomic_write(staging / _PROGRESS, json.dumps(about))
                recorded = writer.written

        with writer as out:
            out.skip(store.tensors_of(done))
            store.write(out, superblock, done=done, checks=checks, written=record)
        report.bytes_written = writer.written
        return report


def _progress(staging: Path, identity: str, file_bytes: int) -> tuple[int, dict[str, str]]:
    """How many layers and tensors of this very store are there already, and checksums of the latter."""
    with suppress(OSError, ArtifactError, ValueError, KeyError, TypeError):
        found = parse(read_bytes(staging / _PROGRESS), _PROGRESS)
        if found["identity"] == identity and (staging / _PARTIAL).stat().st_size == file_bytes:
            return int(found["done"]), dict(found["checks"])
    return 0, {}


def _provenance(source: Path, reader: Any) -> str:
    """Where a store comes from, as JSON: nothing that would differ from one packing to the next."""
    origin: dict[str, Any] = {}
    if hasattr(reader, "provenance"):
        model = reader.provenance().get("model")
        origin |= model if isinstance(model, dict) else {}
    config = source / "config.json"
    if not origin and config.is_file():
        text = read_bytes(config)  # once: what cannot be read is an error, not a store that says less
        origin["config_sha256"] = hashlib.sha256(text).hexdigest()
        with suppress(ArtifactError):
            about = parse(text, config)
            known = about if isinstance(about, dict) else {}
            origin |= {name: known[name] for name in ("model_type", "architectures") if name in known}
    about_us = {"torch_pi2": __version__, "from": reader.file_format}
    return json.dumps(about_us | {"weights": reader.neuron_formats, "model": origin})


class _Writer(TensorWriter):
    """Writes a store into a file that stays when the process is killed.

    Args:
        path: the store. partial: until all is written.

    Attributes:
        written: bytes, by this process.
    """

    def __init__(
        self,
        path: Path,
        partial: Path,
        specs: Mapping[str, Spec],
        metadata: Mapping[str, str],
        progress: bool,
    ) -> None:
        super().__init__(path, specs, metadata, progress=progress, order=list(specs))
        self._temporary, self.written = partial, 0

    def identity(self, superblock: bytes, sources: Sequence[Path]) -> str:
        """Of everything that decides the bytes: layout and settings, and the source files by size and time."""
        return _identity(self._header + superblock, sources)

    def check_space(self) -> None:
        """Raises ArtifactError if there is less space than is missing."""
        there = self._temporary.stat().st_blocks * 512 if self._temporary.exists() else 0
        needed, free = self.file_bytes - there, shutil.disk_usage(self._temporary.parent).free
        if needed > free:
            self._full(needed, free)

    def _open(self) -> int:
        file = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        os.ftruncate(file, self.file_bytes)
        return file

    def _pwrite(self, data: memoryview, offset: int) -> None:
        super()._pwrite(data, offset)
        self.written += len(data)

    def skip(self, names: Sequence[str]) -> None:
        """Tensors that are there already."""
        for name in names:
            self._bar.update(self._left[name])
            self._left[name] = 0

    def sync(self) -> None:
        """Everything written until now is on disk."""
        try:
            os.fsync(self._file)
        except OSError as error:
            self._fail(error)

    def _discard(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _fail(self, error: OSError) -> NoReturn:
        if error.errno == errno.ENOSPC:
            self._full(sum(self._left.values()), shutil.disk_usage(self._temporary.parent).free, error)
        super()._fail(error)

    def _full(self, needed: int, free: int, error: OSError | None = None) -> NoReturn:
        raise ArtifactError(
            f"writing {self.path.name} of {self.file_bytes} bytes",
            expected=f"{needed} bytes of free space in {self._temporary.parent.parent}",
            found=f"{free}",
            fix="Choose another output folder or free some space; nothing was left half-written.",
        ) from error
