"""A GGUF file, imported and decoded, beside llama.cpp on the very same file, type by type in one run.

The files are of random weights: blocks of Q4_0 (:mod:`benchmarks.gguf`), which llama.cpp's own quantiser makes other
types of. All layers are dense on both sides.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import add_activations, list_of
from benchmarks.decode import measure
from benchmarks.figures import spread
from benchmarks.gguf import write_gguf
from benchmarks.peer import Peer
from benchmarks.subject import WORK
from torch_pi2.base.extras import missing_package
from torch_pi2.base.units import size as size_of
from torch_pi2.cli import common
from torch_pi2.errors import ConfigError
from torch_pi2.store.shapes import build_config

#: Name -> code of llama.cpp's quantiser (``llama_ftype``).
TYPES = {"q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q4_k_s": 14, "q4_k_m": 15, "q5_k_m": 17, "q6_k": 18}
#: Run in a process of its own, whose memory is looked at.
_IMPORT = (
    "import json, sys, torch_pi2; from torch_pi2.machine import process; from torch_pi2.ops import load; load(); "
    "process.reset_peak(); before = process.peak_rss_bytes(); "
    "report = torch_pi2.import_gguf(sys.argv[1], sys.argv[2]).to_json(); "
    "print(json.dumps(report | {'before_bytes': before, 'peak_bytes': process.peak_rss_bytes()}))"
)
#: How transformers opens a folder or a store: the model alone, packages imported before.
_OPEN = (
    "import json, sys, time, transformers, torch_pi2.hf; from torch_pi2.ops import load; load(); "
    "started = time.perf_counter(); transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1]); "
    "print(json.dumps(time.perf_counter() - started))"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--shape", default="mistral-7b", help="as `torch-pi2 synthetic --shape`")
    add("--types", type=list_of(str), default=["q4_0", "q4_k_m"], metavar="TYPE,...", help=", ".join(TYPES))
    add_activations(parser)
    add("--prompt", type=common.positive, default=128, metavar="T", help="tokens of the prompt")
    add("--tokens", type=common.positive, default=32, metavar="N", help="tokens of the answer")
    add("--rounds", type=common.positive, default=5, metavar="N", help="alternating rounds")
    add("--seed", type=common.seed, default=0)


def run(
    shape: str = "mistral-7b",
    types: Sequence[str] = ("q4_0", "q4_k_m"),
    *,
    activations: str = "float",
    prompt: int = 128,
    tokens: int = 32,
    rounds: int = 5,
    seed: int = 0,
) -> dict[str, Any]:
    """Make files of ``types``, import them, and measure each beside llama.cpp on torch's current number of threads.

    Returns:
        ``types``: a row each with ``file_bytes``, ``import`` (its report, and ``peak_bytes`` of that process),
        ``opened_s`` (the least and the most seconds of transformers' ``from_pretrained``, in a process each), and what
        :func:`benchmarks.decode.measure` gives.

    Raises:
        ConfigError: an unknown type. LibraryMissingError: no llama_cpp. Pi2Error: what importing and decoding raise.
    """
    import torch_pi2

    if unknown := [name for name in types if name not in TYPES]:
        raise ConfigError("--types", expected=", ".join(TYPES), found=unknown[0], fix="Choose of these.")
    base = write_gguf(WORK / f"{shape}.q4_0.gguf", build_config(shape), seed=seed)
    threads, rows = torch.get_num_threads(), {}
    for name in types:
        file = _quantised(base, name, threads)
        folder = WORK / f"{shape}-{name}-imported"
        report = _run(_IMPORT, file, folder)
        model: Any = torch_pi2.load(folder, activations=activations)
        settings = {"gguf": str(file), "threads": threads, "batches": [1]}
        peer = {"llama.cpp": lambda context, of=settings: Peer("benchmarks.peer_llama", {**of, "context": context})}
        measured = measure(model, prompt=prompt, tokens=tokens, rounds=rounds, peers=peer, seed=seed)
        kept = {key: report[key] for key in ("seconds", "types", "rounded", "bytes_out", "before_bytes", "peak_bytes")}
        del model
        opened = spread([_run(_OPEN, folder) for _ in range(rounds)], 2)
        rows[name] = {"file_bytes": file.stat().st_size, "import": kept, "opened_s": opened, **measured}
    return {
        "what": "imported",
        "shape": shape,
        "activations": activations,
        "synthetic": "random weights",
        "types": rows,
    }


def _run(code: str, *arguments: Path) -> Any:
    """What a Python process prints last, as JSON."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def _quantised(base: Path, name: str, threads: int) -> Path:
    """The file of ``base``'s weights in another type, made by llama.cpp unless it is there."""
    file = base.with_name(f"{base.name.removesuffix('.q4_0.gguf')}.{name}.gguf")
    if file.exists():
        return file
    try:
        import llama_cpp
    except ImportError as error:
        raise missing_package("llama-cpp-python", "bench", error) from error
    how = llama_cpp.llama_model_quantize_default_params()
    how.ftype, how.nthread, how.allow_requantize = TYPES[name], threads, True
    temporary = file.with_name(f".{file.name}.partial")
    failed = llama_cpp.llama_model_quantize(str(base).encode(), str(temporary).encode(), ctypes.byref(how))
    if failed:
        raise ConfigError(
            "llama.cpp's quantiser", expected=f"a file of {name}", found=f"error {failed}", fix="See above."
        )
    temporary.replace(file)
    return file


def render(result: dict[str, Any]) -> str:
    head = (
        "type",
        "file",
        "decoding: tokens/s",
        "llama.cpp",
        "ratio",
        "prompt",
        "llama.cpp",
        "ratio",
        "GB/s",
        "of read",
    )
    rows = []
    for name, row in result["types"].items():
        peer = row["peers"]["llama.cpp"]
        ours = [f"{row[key]:.1f} ({low:.1f} to {high:.1f})" for key, (low, high) in _spreads(row)]
        rows.append(
            (
                *(name, common.size(row["file_bytes"]), ours[0], f"{peer['tokens_per_s']:.1f}", f"{peer['ratio']:.2f}"),
                *(ours[1], f"{peer['prompt_tokens_per_s']:.1f}", f"{peer['prompt_ratio']:.2f}"),
                *(f"{row['gb_per_s']:.1f}", common.percent(row["of_read"], 0)),
            )
        )
    memory = ", ".join(
        f"{name} in {row['import']['seconds']:.0f} s with {size_of(row['import']['peak_bytes'])} at most"
        for name, row in result["types"].items()
    )
    opened = ", ".join(
        "{} in {:.1f} to {:.1f} s".format(name, *row["opened_s"]) for name, row in result["types"].items()
    )
    machine = next(iter(result["types"].values()))["machine"]
    lines = [
        common.table(head, rows),
        f"imported: {memory}",
        f"opened by transformers: {opened}",
        f"{result['shape']}, random weights; {machine['cpu']}",
    ]
    return "\n".join(lines)


def _spreads(row: dict[str, Any]) -> list[tuple[str, tuple[float, float]]]:
    return [(key, tuple(row["spread"][key])) for key in ("tokens_per_s", "prompt_tokens_per_s")]
