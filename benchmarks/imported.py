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
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import add_activations, add_lengths, names_of
from benchmarks.decode import measure
from benchmarks.gguf import write_gguf
from benchmarks.peer import Peer
from benchmarks.subject import WORK
from benchmarks.tables import Result, Table, at, named, ranged
from torch_pi2.base.package import needed
from torch_pi2.cli import common
from torch_pi2.errors import ConfigError
from torch_pi2.store.synthetic import build_config

#: Name -> code of llama.cpp's quantiser (``llama_ftype``).
TYPES = {
    "q4_0": 2,
    "q4_1": 3,
    "q8_0": 7,
    "q5_0": 8,
    "q5_1": 9,
    "q4_k_s": 14,
    "q4_k_m": 15,
    "q5_k_m": 17,
    "q6_k": 18,
    "tq2_0": 37,
}
#: Run in a process of its own, whose memory is looked at.
_IMPORT = (
    "import json, sys, torch_pi2; from benchmarks import cap; from torch_pi2.ops import load; load(); "
    "cap.reset_peak(); before = cap.peak_rss_bytes(); "
    "report = torch_pi2.import_gguf(sys.argv[1], sys.argv[2]).to_json(); "
    "print(json.dumps(report | {'before_bytes': before, 'peak_bytes': cap.peak_rss_bytes()}))"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--shape", default="mistral-7b", help="as `torch-pi2 synthetic --shape`")
    add("--types", type=names_of(TYPES), default=["q4_0", "q4_k_m"], metavar="TYPE,...", help=", ".join(TYPES))
    add_activations(parser)
    add_lengths(parser, 128, 32, 5)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Make files of ``types``, import them, and measure each beside llama.cpp on torch's current number of threads.

    Returns:
        ``types``: a row each with ``file_bytes``, ``import`` (its report, and ``peak_bytes`` of that process),
        and what :func:`benchmarks.decode.measure` gives.

    Raises:
        LibraryMissingError: no llama_cpp. Pi2Error: what importing and decoding raise.
    """
    import torch_pi2

    shape, rounds, seed = args.shape, args.rounds, args.seed
    base = write_gguf(WORK / f"{shape}.q4_0.gguf", build_config(shape), seed=seed)
    threads, rows = torch.get_num_threads(), {}
    for name in args.types:
        file = _quantised(base, name, threads)
        folder = WORK / f"{shape}-{name}-imported"
        report = _run(_IMPORT, file, folder)
        model: Any = torch_pi2.load(folder, activations=args.activations)
        settings = {"gguf": str(file), "threads": threads, "batches": [1]}
        peer = {"llama.cpp": lambda context, of=settings: Peer("benchmarks.peer_llama", {**of, "context": context})}
        measured = measure(model, prompt=args.prompt, tokens=args.tokens, rounds=rounds, peers=peer, seed=seed)
        kept = {key: report[key] for key in ("seconds", "types", "rounded", "bytes_out", "before_bytes", "peak_bytes")}
        del model
        rows[name] = {"file_bytes": file.stat().st_size, "import": kept, **measured}
    return {"synthetic": "random weights", "types": rows}


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
    with needed("llama-cpp-python", "bench"):
        import llama_cpp
    how = llama_cpp.llama_model_quantize_default_params()
    how.ftype, how.nthread, how.allow_requantize = TYPES[name], threads, True
    temporary = file.with_name(f".{file.name}.partial")
    failed = llama_cpp.llama_model_quantize(str(base).encode(), str(temporary).encode(), ctypes.byref(how))
    if failed:
        fix = "See above."
        raise ConfigError("llama.cpp's quantiser", expected=f"a file of {name}", found=f"error {failed}", fix=fix)
    temporary.replace(file)
    return file


TABLES = (
    Table(
        "GGUF files, imported, beside llama.cpp",
        lambda result: named(result["types"]),
        {
            "type": at("name"),
            "file": at("file_bytes", common.size),
            "decoding: tokens/s": ranged("tokens_per_s", ".1f"),
            "llama.cpp": lambda row: f"{row['peers']['llama.cpp']['tokens_per_s']:.1f}",
            "ratio": lambda row: f"{row['peers']['llama.cpp']['ratio']:.2f}",
            "prompt": ranged("prompt_tokens_per_s", ".1f"),
            "its prompt": lambda row: f"{row['peers']['llama.cpp']['prompt_tokens_per_s']:.1f}",
            "ratio of prompts": lambda row: f"{row['peers']['llama.cpp']['prompt_ratio']:.2f}",
            "GB/s": at("gb_per_s", ".1f"),
            "of read": at("of_read", common.percent),
            "imported in s": at("import.seconds", ".0f"),
            "with": at("import.peak_bytes", common.size),
        },
    ),
)


def about(result: Result) -> str:
    return f"{result['shape']}, random weights, {result['activations']} activations"
