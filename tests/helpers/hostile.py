"""Files as somebody could make them who means harm: sound ones of all kinds that Python reads, and how to spoil them.

``make fuzz`` does it at random (tests/fuzz/run.py); tests do it by tables, and for a moment.
What is read must be sound or refused with a ``Pi2Error``; all else is an error here, kept as a file.
"""

from __future__ import annotations

import copy
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torch_pi2.base.tensorfile import Spec, TensorWriter, metadata_check
from torch_pi2.checkpoint.gguf.families import configuration
from torch_pi2.checkpoint.gguf.source import GgufCheckpoint
from torch_pi2.errors import Pi2Error
from torch_pi2.machine.device import PRESETS, find_device
from torch_pi2.machine.hardware import Accelerator, Hardware, Kernel, Line
from torch_pi2.machine.reads import ReadRate, Reads
from torch_pi2.observe.accesses import Accesses, StoredLayer
from torch_pi2.ops import load as load_library
from torch_pi2.predict.file import FitReport, FittedPredictors, load_predictors, save_predictors
from torch_pi2.predict.lowrank import LowRank
from torch_pi2.predict.signbit import SignBit
from torch_pi2.store.folder import read_config
from torch_pi2.store.source import Checkpoint
from torch_pi2.store.storefile import StoreReader
from torch_pi2.store.weights import QuantizedWeights
from torch_pi2.types.method import PredictorCard
from torch_pi2.types.plan import Bucket, HardwarePlan, LayerPlan, Plan, PromptPlan
from torch_pi2.types.site import FFNSite, LinearRef
from torch_pi2.types.stats import HIST_BINS, ActivationStats, LayerStats
from torch_pi2.types.verdict import Loss, Speed, Verdict

HASH = "ab" * 32
#: In place of what ``json.dumps`` cannot write.
DEEP, DIGITS = "\0deep\0", "\0digits\0"
_INSTEAD = {json.dumps(DEEP): "[" * 3000 + "]" * 3000, json.dumps(DIGITS): "9" * 5000}


class Target(NamedTuple):
    """A kind of file: its name in a folder, where JSON is in it (None: it is JSON; GGUF has none), and who reads it.

    ``free``: fields whose content is for people, so that anything may stand there.
    """

    file: str
    texts: tuple[str, ...] | None
    read: Callable[[Path], object]
    free: tuple[str, ...] = ()


def _open(kind: Any) -> Callable[[Path], object]:
    def read(path: Path) -> None:
        with kind(path) as file:
            if isinstance(file, StoreReader):
                file.verify()

    return read


def _read_gguf(path: Path) -> None:
    """What an import reads, but for the model that transformers builds: configuration, and all numbers of tensors."""
    load_library()
    with GgufCheckpoint(path) as checkpoint:
        configuration(checkpoint.file)
        for name in _GGUF_NAMES:
            if name in checkpoint:
                checkpoint.packed(name)
                checkpoint.read(name)
        checkpoint.unused()


_GGUF_LAYER = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj")
_GGUF_LAYER += ("mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm")
_GGUF_NAMES = [f"model.layers.0.{name}.weight" for name in _GGUF_LAYER]
_GGUF_NAMES += ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
_GGUF = Path(__file__).parents[1] / "data" / "gguf" / "tiny-llama.q4_k_m.gguf"

TARGETS: dict[str, Target] = {
    "plan": Target("plan.json", None, lambda p: Plan.load(p.parent), ("made_by", "made_for")),
    "orders": Target("plan.safetensors", (), lambda p: Plan.load(p.parent)),
    "stats": Target("stats.safetensors", ("layers", "made_by"), ActivationStats.load, ("made_by",)),
    "predictors": Target("predictors.safetensors", ("predictors", "report"), load_predictors, ("rounds", "layers")),
    "weights": Target("weights.safetensors", ("linears", "sites"), _open(QuantizedWeights)),
    "store": Target(
        "model.pi2", ("layers", "checks", "linears", "sites", "provenance"), _open(StoreReader), ("provenance",)
    ),
    "verdict": Target("verdict.json", None, lambda p: Verdict.load(p.parent), ("machine", "versions", "not_measured")),
    "hardware": Target("hardware.json", None, Hardware.load, ("notes", "machine", "versions")),
    "device": Target("device.json", None, find_device),
    "accesses": Target("accesses.safetensors", ("stored", "run", "place_bytes"), Accesses.load, ("engine",)),
    "config": Target("config.json", None, lambda p: read_config(p.parent), ("model_type", "layers")),
    "index": Target("model.safetensors.index.json", None, lambda p: Checkpoint(p.parent).close(), ("metadata",)),
    "gguf": Target("model.gguf", (), _read_gguf),
}


def write_sound(root: Path) -> None:
    """A folder for each of ``TARGETS``, with its file, and what belongs to it."""
    site = FFNSite("a", 0, "relu", True, LinearRef("g", None, (0, 8)), LinearRef("u", "b"), LinearRef("d"), 4, 8, "o")
    expert = FFNSite("e", 1, "silu", False, None, LinearRef("m.u", None, None, 0), LinearRef("m.d"), 4, 8, "m", "M")
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0)).int()
    buckets = (Bucket(1, (8, 0), (8, 0), (0, 0), 1 << 20, {"hot": 1.5}),)
    settings = {"policy": "lfu", "io_threads": 32, "lookahead": False}
    threads = {"compute": 2, "io": 1}
    hardware = HardwarePlan({"hash": "x"}, 1 << 30, 0, 64, buckets, PromptPlan((48, 0)), settings, threads)
    layers = [LayerPlan(site, "exact", 3, order, 0.0, 0.5), LayerPlan(expert, "dense", 0, order.clone())]
    for name in ("plan", "orders"):
        Plan(layers, HASH, {"planner": "x"}, hardware).save(root / name)
    many = [torch.arange(8) for _ in range(3)]
    bins = torch.zeros(HIST_BINS, dtype=torch.int64)
    counts = {"fired": many[0], "zeros": many[1], "abs_sum": many[2].double(), "score_hist": bins}
    batches = {"batch_sizes": (1,), "batch_groups": bins[:1].clone(), "batch_fired": many[0][None] + 0}
    one = LayerStats(key="a", layer=0, threshold=0.0, tokens=9, **counts, **batches)
    ActivationStats({"a": one}, HASH, {"seed": 3}).save(root / "stats")
    card = PredictorCard(0.9, 0.5, 0.2, 100, 0.1, 2, None)
    a, b = torch.ones(2, 4, dtype=torch.int8), torch.ones(8, 2, dtype=torch.int8)
    low = LowRank(a, torch.ones(2), b, torch.ones(8), torch.zeros(8), -0.5, card)
    sign = SignBit(torch.zeros(8, 8, dtype=torch.uint8), 4, 0.5, card)
    report = FitReport(1.0, 1.01, 0.01, 0.01, True, 0.5, ({"step": 1},), ({"key": "a"},), {"fit": 3})
    fitted = FittedPredictors({"a": low, "e": sign})
    fitted.report = report
    save_predictors(root / "predictors", fitted, HASH)
    stored = (StoredLayer("a", 8, 1, 512), StoredLayer("e", 8, 1, 512))
    run = {"policy": "lfu", "slots": 4, "hot_share": 0.5, "preload": True, "window": 0, "whole": True}
    run |= {"wanted": 1, "hits": 1, "lost": 0, "resident": [0, 0], "engine": "pread"}
    wanted = (torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.uint8), torch.ones(1, dtype=torch.uint8))
    (root / "accesses").mkdir(parents=True)
    Accesses(stored, HASH, 512, run, *wanted).save(root / "accesses" / "accesses.safetensors")
    texts = {"hardware": _machine().to_json(), "device": json.dumps(PRESETS["ufs-4.0"])}
    texts |= {
        "config": '{"model_type": "llama", "layers": [{"a": 1}]}',
        "index": '{"weight_map": {"w": "one.safetensors"}}',
    }
    for name, text in texts.items():
        (root / name).mkdir()
        (root / name / TARGETS[name].file).write_text(text)
    (root / "gguf").mkdir()
    path_of(root, "gguf").write_bytes(_GGUF.read_bytes())
    with TensorWriter(root / "index" / "one.safetensors", {"w": Spec((2,), torch.float32)}, {}) as out:
        out.write("w", torch.zeros(2))
    speed, loss = Speed(9.0, 3.0, 3.0, 2.5, 3.5, "x"), Loss(0.01, 64, "y")
    about = ({"loss": "z"}, "2026-01-01T00:00:00+00:00", {"cpu": "x"}, {"torch": "2"})
    Verdict(HASH, ("1 of 2 layers lowrank",), ("optimize",), 5, 9, speed, loss, *about).save(root / "verdict")
    _write_stores(root)


def _machine() -> Hardware:
    """A small one: each field once."""
    lines = (Line(1, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0),)
    kernels = {"int4/int8": Kernel(lines, lines, lines)}
    reads = Reads("pread", True, True, 1 << 20, 1.0, 0.0, (ReadRate(4096, 1 << 20, 1, 1e4),))
    accelerator = Accelerator("npu", 1 << 30, 1.0, 1.0, 1.0, 1.0, 1.0)
    about = ({"cpu": "x"}, {"torch": "2"}, {"store": "y"})
    return Hardware("a", "measured", *about, 1, 1, 1, 10.0, kernels=kernels, reads=reads, accelerator=accelerator)


def _write_stores(root: Path) -> None:
    from stores import toy

    from torch_pi2.checkpoint.pack import pack

    folder = toy(root / "toy")
    pack(folder, root / "packed")
    for name, of in (("weights", folder), ("store", root / "packed")):
        (root / name).mkdir()
        (root / name / TARGETS[name].file).write_bytes((of / "pi2" / TARGETS[name].file).read_bytes())


# --- spoiling ---


def path_of(root: Path, name: str) -> Path:
    return root / name / TARGETS[name].file


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def _joined(header: Any, data: bytes) -> bytes:
    text = dumps(header).encode(errors="surrogatepass")
    text += b" " * (-(8 + len(text)) % 4096)
    return len(text).to_bytes(8, "little") + text + data


def dumps(value: Any) -> str:
    text = json.dumps(value)
    for name, instead in _INSTEAD.items():
        text = text.replace(name, instead)
    return text


def documents(name: str, sound: bytes) -> Iterator[tuple[str, Any, Callable[[Any], bytes]]]:
    """Each JSON text in a file: its name, its value, and the file with another value in its place."""
    target = TARGETS[name]
    if name == "gguf":
        return
    if target.texts is None:
        value = json.loads(sound)
        value.pop("crc32c", None)  # what is wrong is to be seen without it, too
        yield "", value, lambda value: dumps(value).encode()
        return
    header, data = split(sound)
    if name == "store":
        seal = header["__metadata__"]["metadata_check"]
    else:  # as an earlier version or another tool wrote it
        seal, meta = None, header.get("__metadata__", {})
        meta.pop("checks", None), meta.pop("metadata_check", None)

    def joined(header: Any, data: bytes) -> bytes:
        """With the checksum of other metadata, so that what is wrong is seen without it."""
        meta = header.get("__metadata__") if isinstance(header, dict) else None
        texts = isinstance(meta, dict) and all(isinstance(text, str) for text in meta.values())
        if seal is not None and texts and meta.get("metadata_check") == seal:
            header = header | {"__metadata__": meta | {"metadata_check": metadata_check(meta)}}
        return _joined(header, data)

    yield "header", header, lambda value: joined(value, data)
    for text in target.texts:

        def other(value: Any, text: str = text) -> bytes:
            return joined(header | {"__metadata__": header["__metadata__"] | {text: dumps(value)}}, data)

        yield text, json.loads(header["__metadata__"][text]), other


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Ways to all fields, and to the first elements of lists."""
    items: Any = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        items = enumerate(value[:1])
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def changed(value: Any, path: tuple[str | int, ...], new: Any) -> Any:
    """``value`` with ``new`` at ``path``; ``...``: without it."""
    value = at = copy.copy(value)
    for key in path[:-1]:
        at[key] = copy.copy(at[key])
        at = at[key]
    if new is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = new
    return value


ODD: dict[str, Any] = {
    "missing": ...,
    "null": None,
    "text": "no such thing",
    "half a character": "\ud800",
    "truth": True,
    "fraction": 0.5,
    "negative": -1,
    "zero": 0,
    "huge": 10**30,
    "digits": DIGITS,
    "nan": float("nan"),
    "infinity": float("inf"),
    "list": [[]],
    "object": {"a": {}},
    "deep": DEEP,
}


def refused(name: str, path: Path) -> Pi2Error | None:
    """What reading ``path`` raises; None: it is sound. Anything but a Pi2Error goes through."""
    try:
        TARGETS[name].read(path)
    except Pi2Error as error:
        if len(str(error)) > 3000:
            raise AssertionError(f"a message of {len(str(error))} characters") from error
        return error
    return None


# --- at random ---

_TOKENS = (
    *(bytes([sign]) for sign in b'"{}[],:'),
    *(b"-1", b"1e999", b"null", b"true", b"NaN", b"9" * 30, b"\0", b"\xff"),
)
_SOME = [value for name, value in ODD.items() if name != "deep"]


class _Text(NamedTuple):
    value: Any
    ways: list[tuple[str | int, ...]]
    other: Callable[[Any], bytes]


def spoiled(sound: bytes, texts: list[_Text], chance: random.Random) -> bytes:
    """``sound`` with one to four random changes: fields of its JSON ``texts``, or bytes."""
    if texts and chance.random() < 0.6:
        text = chance.choice(texts)
        value = changed(text.value, chance.choice(text.ways), chance.choice(_SOME))
        return text.other(value)
    made = bytearray(sound)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(made) + 1) if chance.random() < 0.5 else chance.randrange(min(len(made), 2048) + 1)
        end = at + chance.randint(0, 4)
        made[at:end] = chance.choice((b"", chance.choice(_TOKENS), chance.randbytes(end - at)))
    return bytes(made)


def fuzz(root: Path, name: str, *, seed: int, executions: int = 1 << 62, seconds: float = 1e9) -> int:
    """Spoil a sound file at random, so often or so long; how often it was. What is not refused well is kept."""
    chance, until, path = random.Random(f"{name} {seed}"), time.monotonic() + seconds, path_of(root, name)
    sound = path.read_bytes()
    texts = [_Text(value, list(places(value)), other) for _, value, other in documents(name, sound)]
    texts = [text for text in texts if text.ways]
    for count in range(executions):
        if time.monotonic() > until:
            executions = count
            break
        data = spoiled(sound, texts, chance)
        path.write_bytes(data)
        try:
            refused(name, path)
        except BaseException:
            kept = Path(f"crash-{name}-{seed}-{count}")
            kept.write_bytes(data)
            path.write_bytes(sound)
            print(f"{name}: execution {count} of seed {seed}: see {kept.resolve()}", file=sys.stderr)
            raise
    path.write_bytes(sound)
    return executions
