"""``torch_pi2.pack``: a folder becomes a neuron store, in pieces, and goes on where it was killed."""

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
from torch_pi2.checkpoint.dealing import check_ranks, deal, deal_layers
from torch_pi2.checkpoint.float_neurons import float_neurons
from torch_pi2.checkpoint.quantize import copy_small_files, quantize, small_files
from torch_pi2.errors import ArtifactError, ConfigError, check_choice
from torch_pi2.formats import FLOAT, FLOATS, QUANTIZED
from torch_pi2.store.folder import PI2_FOLDER, check_replaceable, check_separate, declare
from torch_pi2.store.layout import Layout
from torch_pi2.store.parts import PartFiles, Parts, check_predictors
from torch_pi2.store.shards import PartOf, WholeOf, refuse_shard, shard_name, shards_in
from torch_pi2.store.slots import write_slots
from torch_pi2.store.storefile import (
    PADDING,
    PIECE,
    STORE_FILE,
    SUPERBLOCK,
    StoreReader,
    block_checks,
    hot_neurons,
    open_weights,
    part_of,
    tensor_check,
    weights_path,
)
from torch_pi2.store.superblock import (
    MOST_CLUSTER,
    SECTOR,
)
from torch_pi2.store.trust import remember
from torch_pi2.types.plan import LayerPlan, Plan
from torch_pi2.types.shard import Shard

#: Of neurons; ``float``: what the model has, nothing is rounded.
WEIGHTS = (*QUANTIZED, FLOAT, *FLOATS)
#: What of a model a machine's shard has, see :func:`pack`.
BY = ("neurons", "layers")
#: Bytes after which what is written is put on disk and recorded: as many are written again after a kill, at most.
_RECORD = 64 << 20
_PROGRESS, _PARTIAL, _NEURONS = "progress.json", f".{STORE_FILE}.partial", "bundles"
#: Beside a finished shard while others are being written: its name and this.
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

    No number is changed, unless ``weights`` says so: a packed model computes what the folder computes. Some ten MB of
    memory are used whatever the size; for float checkpoints a layer's FFN at most. ``folder_out``
    appears when all is there. A process that is killed or interrupted leaves ``.NAME.partial`` beside it, with which
    the same call goes on, if the source is the same file (by size, time and hash) and the settings are the same;
    otherwise it starts anew, as does every other call that writes ``folder_out``. After an error nothing is left.

    Args:
        folder_in: written by :func:`torch_pi2.save`, ``quantize``, ``synthetic`` or ``pack``; or a float checkpoint.
            Of shards all must be there; they become one store again, or as many shards as ``ranks``.
        weights: of the neurons of a float checkpoint: ``float`` (default; the model's own dtype), or ``float32``,
            ``bfloat16`` or ``float16``, rounded to where they are something else; everything else stays as it is.
            ``int4`` or ``int8``: quantised, and other linear layers as well (lossy). Neurons are made in
            ``.NAME.partial`` for the time being. Folders of quantised neurons: None, or what they are.
        slot_align: bytes from one neuron to the next are a multiple of it, a power of two from 512 to 65536 (default:
            4096, the page that a device reads; 512 for neurons below that).
        cluster: neurons that are read and kept together, a power of two up to 64. Default: 1 if there is a predictor
            that says which are wanted; else all of a layer are, and clusters have some 200 KB, which devices read best.
        ranks: more than 1: shards, each the store of one of so many machines, in folders ``rank-0-of-N`` and so on,
            which :func:`torch_pi2.load` takes in a group of as many processes (docs/DISTRIBUTED.md).
        shares: of the neurons, for each machine, in any unit (default: the same for all).
        by: what of them a shard has: ``neurons``, some of every layer; or ``layers``, all of some decoder blocks that
            follow each other, and of others nothing (stages of a pipeline).
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
        made = None
        shards = shards_in(source)
        if weights_path(source / PI2_FOLDER) is None and not shards:
            made = _as_neurons(source, staging / _NEURONS, weights or FLOAT, trust_remote_code, progress)
        with _opened(made or source, None if made else weights, shards) as whole:
            if ranks == 1:
                report = _pack(whole, staging, slot_align, cluster, progress)
            else:
                report = _pack_shards(whole, staging, _dealt(whole, ranks, shares, by), slot_align, cluster, progress)
        _remove(staging / _NEURONS)
    if trust_remote_code:
        remember(folder)
    report.seconds = time.perf_counter() - start
    return report


def _check(weights: str | None, slot_align: int | None, cluster: int | None) -> None:
    if weights not in (None, *WEIGHTS):
        raise ConfigError("pack(weights=...)", expected=" or ".join(WEIGHTS), found=repr(weights), fix="Choose one.")
    if slot_align is not None and (slot_align & (slot_align - 1) or not SECTOR <= slot_align <= 65536):
        raise ConfigError(
            "pack(slot_align=...)",
            expected="a power of two from 512 to 65536",
            found=repr(slot_align),
            fix="Leave it out, or take the block size of the device.",
        )
    if cluster is not None and (cluster & (cluster - 1) or not 1 <= cluster <= MOST_CLUSTER):
        raise ConfigError(
            "pack(cluster=...)",
            expected=f"a power of two from 1 to {MOST_CLUSTER}",
            found=repr(cluster),
            fix="Leave it out.",
        )


def _as_neurons(source: Path, made: Path, weights: str, trust_remote_code: bool, progress: bool) -> Path:
    """A folder ``made`` of neurons, of the float checkpoint ``source``; one that a kill left is used again."""
    make = quantize if weights in QUANTIZED else float_neurons
    about, marker = _source_marker(source, weights), made / PI2_FOLDER / "source.json"
    if not marker.is_file() or marker.read_text() != about:
        _remove(made)
        make(source, made, weights, trust_remote_code=trust_remote_code, progress=progress)
        atomic_write(marker, about)
    return made


def _source_marker(source: Path, weights: str) -> str:
    """What neurons are made of: every file that is read or copied for them, and who makes them."""
    weight_files = [p for pattern in ("*.safetensors", "*.index.json") for p in source.glob(pattern)]
    plan = [p for p in (source / PI2_FOLDER).glob("*") if p.is_file()]
    files = sorted((*weight_files, *small_files(source), *plan))
    stamps = [(str(p.relative_to(source)), p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    return json.dumps([__version__, weights, str(source), stamps])


@dataclass
class _Packed:
    """What is packed: its small files are in ``folder``, and the files ``sources`` have its weights."""

    folder: Path
    sources: list[Path]
    reader: Any  # QuantizedWeights, or what has all of them: WholeOf
    beside: PartFiles
    parts: Parts
    plan: Plan


@contextmanager
def _opened(source: Path, weights: str | None, shards: dict[int, Path]) -> Iterator[_Packed]:
    """The folder ``source``, or that of ``shards``. Raises ConfigError: its neurons are not ``weights``."""
    folder = next(iter(shards.values()), source)
    pi2 = folder / PI2_FOLDER
    with Parts(pi2) as parts:
        plan, inside = parts.plan(), parts.inside
        _check_parts(parts, plan, source)
        whole: Any = WholeOf(source, shards) if shards else open_weights(pi2)
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
            yield _Packed(folder, sources, reader, beside, parts, plan)


def _pack(
    whole: _Packed,
    staging: Path,
    slot_align: int | None,
    cluster: int | None,
    progress: bool,
    shard: Shard | None = None,
) -> PackReport:
    """Write a store of ``whole``, or of its ``shard``, and everything else of its folder."""
    plan, reader = whole.plan, whole.reader
    here, had = plan, reader
    if shard is not None:
        here, had = shard.plan(plan), PartOf(reader, plan, shard)
    layout = _layout(had, whole.beside, here, slot_align, cluster, plan, shard)
    sites = {"sites": json.dumps({layer.site.key: reader.way(layer.site.key) for layer in here.layers})}
    about = layout.metadata(had.metadata | sites, _provenance(whole.folder, reader))
    for path in staging.iterdir():
        if path.name not in (_PROGRESS, _PARTIAL) and path != whole.folder:
            _remove(path)
    (staging / PI2_FOLDER).mkdir()
    copy_small_files(whole.folder, staging)
    report = _write(layout, about, had, whole, here, staging, progress)
    with StoreReader(staging / PI2_FOLDER / STORE_FILE) as made:
        report.file_bytes, report.regions = made.file_bytes, made.regions()
    declare(staging)
    _remove(staging / _PROGRESS)
    return report


def _pack_shards(
    whole: _Packed,
    staging: Path,
    shards: Sequence[Shard],
    slot_align: int | None,
    cluster: int | None,
    progress: bool,
) -> PackReport:
    """A folder for each of ``shards``; those that an earlier call has finished are kept."""
    total, ranks = PackReport(layers=len(whole.plan.layers)), len(shards)
    source = _identity(__version__.encode(), [*whole.sources, *small_files(whole.folder)])
    for shard in shards:
        folder = staging / shard_name(shard.rank, ranks)
        done, about = folder.with_suffix(_DONE), json.dumps([source, shard.to_json(), slot_align, cluster])
        if not done.is_file() or done.read_text() != about:
            folder.mkdir(exist_ok=True)
            _remove(done)  # before anything else of what it stands for
            report = _pack(whole, folder, slot_align, cluster, progress, shard)
            atomic_write(done, about)
            total.bytes_written += report.bytes_written
            total.resumed_layers += report.resumed_layers
        else:
            total.resumed_layers += len(shard.plan(whole.plan).layers) if shard.by_layers else total.layers
        with StoreReader(folder / PI2_FOLDER / STORE_FILE) as made:
            total.file_bytes += made.file_bytes
            total.neurons += sum(entry.neurons for entry in made.entries)
            total.regions = {name: total.regions.get(name, 0) + size for name, size in made.regions().items()}
    for path in staging.iterdir():
        if not _of_shards(path, ranks):
            _remove(path)
    return total


def _dealt(whole: _Packed, ranks: int, shares: Sequence[float] | None, by: str) -> list[Shard]:
    if by == "layers":
        return deal_layers(whole.plan, ranks, shares)
    return deal(whole.plan, ranks, shares, whole.parts.stats())


def _of_shards(path: Path, ranks: int) -> bool:
    return path.name in {shard_name(rank, ranks) for rank in range(ranks)}


def _remove(path: Path) -> None:
    """A file or folder in the staging folder, if it is there. Raises OSError."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _check_parts(parts: Parts, plan: Plan, source: Path) -> None:
    """Raises ArtifactError or StaleArtifactError for predictors or statistics that do not belong to ``plan``."""
    check_predictors(plan, parts.each_predictor(plan.model_hash), source)
    parts.check_stats(plan.model_hash)


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


def _layout(
    reader: Any,
    beside: PartFiles,
    plan: Plan,
    align: int | None,
    cluster: int | None,
    whole: Plan,
    shard: Shard | None,
) -> Layout:
    """Of the store of a folder, or of one ``shard`` of it, of whose layers ``plan`` is: what ``reader`` and the files
    ``beside`` it have. Raises ArtifactError: not all.
    """
    keys = [layer.site.key for layer in plan.layers]
    if not keys:
        raise ConfigError(
            f"packing {reader.path.parent.parent}",
            expected="layers of neurons",
            found="none",
            fix="Import its file or checkpoint again, with neurons='all' (--neurons all).",
        )
    for layer in plan.layers:
        reader.read_neurons(layer.site, (0, 0))  # refuses what is not there
    ours = {f"{key}.{what}" for key in keys for what in ("bundles", "checks")} | {SUPERBLOCK}
    weights = {n: spec for n, spec in reader.specs.items() if n not in ours and not PADDING.fullmatch(n)}
    parts = dict(beside.specs)
    if not parts:  # the reader has them
        parts = {n: weights.pop(n) for n in list(weights) if part_of(n) is not None}
    layers = [(layer.site, hot_neurons(layer), reader.format_of(layer.site.key)) for layer in plan.layers]
    return Layout(whole, layers, [parts, weights], cluster, align, shard)


def _superblock(layout: Layout, plan: Plan, path: Path, out: TensorWriter) -> bytes:
    """Raises ArtifactError for a model hash that is none."""
    try:
        return layout.superblock(out).pack()
    except ValueError as error:
        raise ArtifactError(
            str(path),
            expected="a hexadecimal model_hash",
            found=repr(plan.model_hash),
            fix="Make the folder again.",
        ) from error


def _identity(made: bytes, sources: Sequence[Path]) -> str:
    """Of what is ``made`` of files, by their sizes and times."""
    digest = hashlib.sha256(made)
    for source in sources:
        about = source.stat()
        digest.update(json.dumps([str(source), about.st_size, about.st_mtime_ns]).encode())
    return digest.hexdigest()


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
        *,
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


def _write(
    layout: Layout,
    about: Mapping[str, str],
    reader: Any,
    whole: _Packed,
    plan: Plan,
    staging: Path,
    progress: bool,
) -> PackReport:
    """Write the store of ``layout`` into ``staging``, where an earlier call may have begun it."""
    layers = plan.layers
    store, partial = staging / PI2_FOLDER / STORE_FILE, staging / _PARTIAL
    writer = _Writer(store, partial, layout.specs, about, progress=progress)
    superblock = _superblock(layout, plan, reader.path, writer)
    identity = writer.identity(superblock, whole.sources)
    done, checks = _progress(staging, identity, writer.file_bytes)
    if not done:
        for path in (staging / _PROGRESS, partial):  # in this order: what is recorded must be there
            path.unlink(missing_ok=True)
    writer.check_space()
    report = PackReport(layers=len(layers), neurons=sum(layer.site.intermediate for layer in layers))
    report.resumed_layers = min(done, len(layers))
    with writer as out:
        layout.begin(out, superblock)
        recorded = out.written
        items: list[LayerPlan | str] = [*layers, *layout.others]
        for index, item in enumerate(items):
            if index < done:
                out.skip(_tensors(item))
                continue
            if isinstance(item, LayerPlan):
                _write_layer(item, reader, out, layout.cluster)
            else:
                checks[item] = _write_other(item, whole.beside if item in whole.beside.specs else reader, out)
            if out.written - recorded >= _RECORD:
                out.sync()
                _record(staging, identity, index + 1, checks)
                recorded = out.written
        out.set_metadata("checks", json.dumps({name: checks[name] for name in layout.others}))
    report.bytes_written = writer.written
    return report


def _progress(staging: Path, identity: str, file_bytes: int) -> tuple[int, dict[str, str]]:
    """How many layers and tensors of this very store are there already, and checksums of the latter."""
    with suppress(OSError, ArtifactError, ValueError, KeyError, TypeError):
        found = parse(read_bytes(staging / _PROGRESS), _PROGRESS)
        if found["identity"] == identity and (staging / _PARTIAL).stat().st_size == file_bytes:
            return int(found["done"]), dict(found["checks"])
    return 0, {}


def _record(staging: Path, identity: str, done: int, checks: Mapping[str, str]) -> None:
    """What is on disk before this is called is there after a kill."""
    atomic_write(staging / _PROGRESS, json.dumps({"identity": identity, "done": done, "checks": dict(checks)}))


def _tensors(item: LayerPlan | str) -> list[str]:
    return [item] if isinstance(item, str) else [f"{item.site.key}.{what}" for what in ("bundles", "checks")]


def _write_layer(layer: LayerPlan, reader: Any, out: _Writer, cluster: int) -> None:
    site = layer.site
    write_slots(site.key, site.intermediate, lambda *rows: reader.read_neurons(site, rows), out, cluster)


def _write_other(name: str, reader: Any, out: _Writer) -> str:
    """Copy a tensor; its checksum."""
    size, blocks = reader.specs[name].nbytes, []
    for start in range(0, size, PIECE):
        data = reader.read_bytes(name, start, min(start + PIECE, size))
        blocks.append(block_checks(data))
        out.write_bytes(name, data, start)
    if hasattr(reader, "compare"):
        reader.compare(name, blocks)
    return tensor_check(name, reader.specs[name], blocks)
