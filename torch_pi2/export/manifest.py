"""``manifest.json`` of a bundle: the model, its provenance, and size and checksums of every file."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from torch_pi2.base.crc32c import continue_crc32c, crc32c_of_file
from torch_pi2.base.fields import Field, to_json
from torch_pi2.base.files import atomic_write, read_json
from torch_pi2.base.progress import bar
from torch_pi2.errors import ArtifactError

MANIFEST_FILE = "manifest.json"
#: A user's file that may lie in a bundle, not in the manifest.
_BESIDE = "README.md"
FORMAT = "torch_pi2.bundle"
VERSION = 4
#: ExecuTorch's program, and the neuron store.
PROGRAM_FILE = "model.pte"
STORE_FILE = "model.pi2"
#: ExecuTorch's name for the constant method with the KV cache's length.
CONTEXT_METHOD = "get_max_context_len"
KINDS = ("decoder", "module")
METHOD_KINDS = ("forward", "prefill", "decode", "fork")
#: Neurons of a hot chunk: matrices of 512 x H keep a phone's NPU busy.
CHUNK = 512

#: Fields with another path in the file than their name.
_PLACES: dict[str, tuple[str, ...]] = {"class_name": ("class",)}
_PLACES |= {f"{part}_bytes": ("bytes", part) for part in ("pte", "store", "ffn")}
_PLACES |= {name: ("memory", name) for name in ("fixed_bytes", "token_bytes")}
_FIX = "Use the torch_pi2 that wrote it, or export again."
#: The first line: the checksum of all following bytes.
_FIRST_LINE = re.compile(rb'\{"crc32c": "([0-9a-f]{8})",\n')
_TARGET = re.compile(r"xnnpack|qnn:[A-Za-z0-9]+")


@dataclass(frozen=True)
class FileEntry:
    """A file's size, its CRC32C (8 hexadecimal digits), verified when loading, and its SHA-256 (64)."""

    bytes: int
    crc32c: str
    sha256: str

    @classmethod
    def of(cls, path: Path, progress: Any = None) -> "FileEntry":
        """The entry of the file at ``path``; ``progress`` has ``update(bytes)``. Raises OSError."""
        digest = hashlib.sha256()
        count, crc = crc32c_of_file(path, progress, digest.update)
        return cls(count, crc, digest.hexdigest())


@dataclass(frozen=True)
class MethodEntry:
    """One method. ``kind``: of ``METHOD_KINDS``. ``max_tokens``: per call and sequence. ``hot_chunks``: per layer,
    chunks of ``chunk_neurons`` on the accelerator; empty without one.
    """

    kind: str
    batch: int
    max_tokens: int
    hot_chunks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Model:
    """The exported model. ``class_name``: ``class`` in the file. ``model_type``: Hugging Face's, or None.
    ``model_hash``: of the FFN weights, as in plan.json. ``weights``: format in the store, or ``none``. ``linears``: of
    other linear layers. ``layers``: FFNs in the store; 0: there is none. ``hidden``: input size. ``vocab``: size of the
    logits, or None.
    """

    class_name: str
    model_type: str | None
    model_hash: str
    weights: str
    linears: str
    layers: int
    hidden: int
    vocab: int | None


@dataclass(frozen=True)
class Manifest:
    """The whole file; ``docs/BUNDLE.md`` explains the fields, :func:`from_json` checks all of them.

    Attributes:
        kind: "decoder" or "module". target: "xnnpack" or "qnn:SOC". made_by: package -> version.
        files: name -> entry of all other files. methods: name -> method: of a decoder ``forward``, ``decode_bN``, for
            several lanes ``fork``, and ``prefill_N`` if an accelerator reads prompts; of a module ``forward``.
        max_tokens: length of the KV cache, prompt and answer together. lanes: most sequences at once.
        eos: tokens that end an answer. bos: the token that begins a text, or None.
        lossy: differences from the model, in words.
        pte_bytes, store_bytes, ffn_bytes: ``bytes`` in the file: of the two files, and of the neurons alone.
        fixed_bytes, token_bytes: ``memory`` in the file: without the neuron cache, and mean bytes of neurons that a
            token needs.
    """

    kind: str
    target: str
    made_by: Mapping[str, str]
    files: Mapping[str, FileEntry]
    model: Model
    methods: Mapping[str, MethodEntry]
    max_tokens: int
    lanes: int
    pte_bytes: int
    store_bytes: int
    ffn_bytes: int
    fixed_bytes: int
    token_bytes: int
    eos: tuple[int, ...] = ()
    bos: int | None = None
    lossy: tuple[str, ...] = ()
    chunk_neurons: int = CHUNK
    #: Where it was read from, for messages.
    where: str = field(default=MANIFEST_FILE, compare=False)

    def __post_init__(self) -> None:
        _check(self)

    @property
    def batches(self) -> tuple[int, ...]:
        """Batch sizes of the decoding methods, ascending."""
        return tuple(sorted(m.batch for m in self.methods.values() if m.kind == "decode"))

    @property
    def prefills(self) -> tuple[int, ...]:
        """Token counts of the methods ``prefill_N``, ascending."""
        return tuple(sorted(m.max_tokens for m in self.methods.values() if m.kind == "prefill"))

    def pieces(self, length: int) -> Iterator[tuple[str, int, int]]:
        """Calls that read a prompt of ``length`` tokens: (method, first token, tokens).

        The smallest ``prefill_N`` for all remaining tokens, else the largest; ``forward`` if none fits.
        """
        at = 0
        while at < length:
            remaining = length - at
            fits = [n for n in self.prefills if at + n <= self.max_tokens]
            size = min((n for n in fits if n >= remaining), default=max(fits, default=0))
            count = min(remaining, size or self.methods["forward"].max_tokens)
            yield f"prefill_{size}" if size else "forward", at, count
            at += count

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {"format": FORMAT, "version": VERSION}
        for name, value in to_json(self).items():
            if name != "where":
                *outer, last = _PLACES.get(name, (name,))
                (data.setdefault(outer[0], {}) if outer else data)[last] = value
        data["model"] = {"class": data["model"].pop("class_name"), **data["model"]}
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any], where: str = MANIFEST_FILE) -> "Manifest":
        """Inverse of :meth:`to_json`; ignores unknown fields. Raises ArtifactError, with ``where`` and the field."""
        return _made(cls, Field(data, where, _FIX), where=where)

    def save(self, folder: str | Path) -> None:
        """Write ``folder``/manifest.json atomically. Raises ArtifactError."""
        atomic_write(Path(folder) / MANIFEST_FILE, sealed(self.to_json()))

    @classmethod
    def load(cls, folder: str | Path, verify: bool = True) -> "Manifest":
        """The manifest of a bundle; ``verify=False`` ignores its own checksum. Raises ArtifactError."""
        path = Path(folder) / MANIFEST_FILE
        if not path.is_file():
            Field(folder, str(folder), "Make one: torch-pi2 export MODEL --out BUNDLE.").wrong(
                f"a bundle: a folder with {MANIFEST_FILE}", "none in it" if Path(folder).is_dir() else "no such folder"
            )
        manifest = cls.from_json(read_json(path, FORMAT, VERSION, checked=False), str(path))
        if verify:
            _check_seal(path.read_bytes(), path)
        return manifest

    def verify(
        self,
        folder: str | Path,
        what: Literal["sizes", "loaded", "all"] = "sizes",
        progress: bool = False,
        store: Path | None = None,
    ) -> int:
        """Compare the names and sizes of a bundle's files with the manifest, without names that start with a dot;
        returns bytes read. ``what``: "loaded": also CRC32C of all files but model.pi2, whose parts have checksums that
        reads verify; "all": also CRC32C and SHA-256 of every file. ``store``: path of model.pi2 if not in ``folder``.
        Raises ArtifactError: a file, which the message names, is missing, changed, or not in the manifest.
        """
        folder = Path(folder)
        paths = {name: folder / name for name in self.files}
        if store is not None and STORE_FILE in paths:
            paths[STORE_FILE] = store
        for name, entry in self.files.items():
            _check_file(paths[name], entry, "sizes")
        known = {*self.files, MANIFEST_FILE, _BESIDE}
        others = {p.name for p in folder.iterdir() if not p.name.startswith(".")} - known
        if others:
            fix = "Move it out of the bundle, or export again."
            Field(others, str(folder / min(others)), fix).wrong(f"only the files that {MANIFEST_FILE} names", "another")
        if what == "sizes":
            return 0
        read = {name: e for name, e in self.files.items() if what == "all" or name != STORE_FILE}
        total = sum(entry.bytes for entry in read.values())
        with bar(None, "verify", progress, total=total, unit="B", unit_scale=True, leave=False) as shown:
            for name, entry in read.items():
                _check_file(paths[name], entry, what, shown)
        return total


def sealed(data: Mapping[str, Any]) -> str:
    """The text of ``manifest.json``, with the CRC32C of the rest in its first line."""
    rest = json.dumps({name: value for name, value in data.items() if name != "crc32c"}, indent=1)[2:] + "\n"
    return f'{{"crc32c": "{continue_crc32c(0, rest.encode()):08x}",\n{rest}'


def _check_seal(text: bytes, path: Path) -> None:
    """Raises ArtifactError: the text is not as :func:`sealed` wrote it."""
    first = _FIRST_LINE.match(text)
    found = f"{continue_crc32c(0, text[first.end() :]):08x}" if first else "none"
    if first and found == first.group(1).decode():
        return
    expected = "its CRC32C of all that follows in the first line" + (f", {first.group(1).decode()}" if first else "")
    fix = "Copy the bundle again, export again, or pass --no-verify (verify=False) if the change is meant."
    raise ArtifactError(str(path), expected=expected, found=f"{found}: it was changed or damaged", fix=fix)


def describe_files(folder: str | Path) -> dict[str, FileEntry]:
    """Name -> entry of all files in ``folder`` but the manifest. Raises OSError."""
    paths = sorted(p for p in Path(folder).iterdir() if p.is_file() and p.name != MANIFEST_FILE)
    return {path.name: FileEntry.of(path) for path in paths}


def _check_file(path: Path, entry: FileEntry, what: str, progress: Any = None) -> None:
    """Raises ArtifactError: the file differs from ``entry``. ``what``: see :meth:`Manifest.verify`."""

    def differs(expected: str, found: str) -> ArtifactError:
        fix = "Copy the bundle again, or export again."
        return ArtifactError(str(path), expected=f"{expected}, as {MANIFEST_FILE} says", found=found, fix=fix)

    def sums(entry: FileEntry) -> str:
        return f"CRC32C {entry.crc32c}" + (f" and SHA-256 {entry.sha256[:12]}..." if what == "all" else "")

    try:
        if what == "sizes":
            size = path.stat().st_size if path.is_file() else None
            if size != entry.bytes:
                cut = ": it is cut" if size is not None and size < entry.bytes else ""
                said = "no such file" if size is None else f"{size} bytes{cut}"
                raise differs(f"{entry.bytes} bytes", said)
            return
        whole = what == "all"
        found = FileEntry.of(path, progress) if whole else FileEntry(*crc32c_of_file(path, progress), entry.sha256)
    except OSError as error:
        fix = "Check its permissions."
        why = error.strerror or str(error)
        raise ArtifactError(str(path), expected="a file that can be read", found=why, fix=fix) from error
    if found != entry:
        raise differs(sums(entry), f"{sums(found)}: it was changed or damaged")


def _made(kind: Any, found: Field, **more: Any) -> Any:
    """The dataclass ``kind`` from its fields in a file, at :data:`_PLACES`; further fields are ignored."""
    hints = {name: hint for name, hint in get_type_hints(kind).items() if name != "where"}
    fields = {}
    for name, hint in hints.items():
        at = found
        for part in _PLACES.get(name, (name,)):
            at = at.at(part)
        one: Any = next((kind for kind in get_args(hint) if is_dataclass(kind)), hint)  # of a mapping
        if not is_dataclass(one):
            fields[name] = at.take(hint)
        elif one is hint:
            fields[name] = _made(one, at)
        else:
            fields[name] = {key: _made(one, item) for key, item in at.each().items()}
    return kind(**fields, **more)


def _check(m: Manifest) -> None:
    """Raises ArtifactError for invalid combinations of fields."""

    def require(fits: bool, name: str, expected: str, found: object) -> None:
        if not fits:
            Field(found, f"{m.where}, {name}", _FIX).wrong(expected)

    require(m.kind in KINDS, "kind", " or ".join(KINDS), m.kind)
    require(_TARGET.fullmatch(m.target) is not None, "target", "xnnpack or qnn:SOC, such as qnn:SM8650", m.target)
    for name in m.files:
        plain = name not in ("", ".", "..", MANIFEST_FILE) and not set(name) & set("/\\\0")
        require(plain, "files", "names of files without folders", name)
    for name in (PROGRAM_FILE, STORE_FILE) if m.model.layers else (PROGRAM_FILE,):
        require(name in m.files, "files", f"an entry of {name}", ", ".join(m.files) or "none")
    for name, method in m.methods.items():
        sized = {"decode": f"decode_b{method.batch}", "prefill": f"prefill_{method.max_tokens}"}
        known = method.kind in METHOD_KINDS and method.batch > 0 and method.max_tokens > 0
        require(known and name == sized.get(method.kind, method.kind), f"methods.{name}", "what its name says", method)
    names, found = {*m.methods}, ", ".join(m.methods) or "none"
    if m.kind == "module":
        require(names == {"forward"}, "methods", "only forward", found)
        return
    require("forward" in names and m.batches != (), "methods", "forward and decode_bN", found)
    require("fork" in names or m.lanes == 1, "methods", "fork, for more than one lane", found)
    require(m.lanes == m.batches[-1], "lanes", f"{m.batches[-1]}, as the largest batch", m.lanes)
    longest = max(m.methods["forward"].max_tokens, *m.prefills, 0)
    require(longest <= m.max_tokens, "max_tokens", f"at least {longest}, as its methods take", m.max_tokens)
    require(bool(m.model.vocab), "model.vocab", "1 or more in a decoder", m.model.vocab)
