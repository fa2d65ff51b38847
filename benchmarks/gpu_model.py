"""A whole model on a GPU: our layers beside dense ones; and, in less memory than it takes, beside offloading and
llama.cpp.

Greedy answers of one sequence. Models that are on the GPU as a whole have a static cache, whose steps transformers
compiles (``max-autotune``: into CUDA graphs); divided ones run eagerly. ``--device cpu`` runs the same calls there, to
see that they are right.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.figures import alternate, at_least, spread, way_rows
from benchmarks.gguf import write_gguf
from benchmarks.peer import Peer
from benchmarks.subject import WORK, Subject
from torch_pi2.checkpoint.save_load import load_dense
from torch_pi2.cli import common
from torch_pi2.errors import Pi2Error, UnsupportedModelError
from torch_pi2.layers.gpu import check_gpu
from torch_pi2.layers.of_model import homes
from torch_pi2.machine import process as machine
from torch_pi2.rewrite.gpu import hot_on_gpu, rest_bytes

#: Tokens of a greedy answer to ids ``[1, T]``.
Answer = Callable[[torch.Tensor], list[int]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--folder", type=Path, metavar="DIR", help="model folder (default: work/bench/SHAPE-WEIGHTS-0.1, made)")
    add("--shape", default="mistral-7b", metavar="NAME", help="of the model that is made (default: %(default)s)")
    add("--weights", default="bfloat16", help="of the model that is made (default: %(default)s)")
    add("--share", type=float, metavar="S", help="of the feed-forward layers' bytes in the GPU's memory, 0..1: divided")
    add("--prompt", type=common.positive, default=16, metavar="T", help="tokens of the prompt (default: 16)")
    add("--tokens", type=common.positive, default=64, metavar="N", help="tokens of the answer (default: 64)")
    add("--rounds", type=common.positive, default=5, metavar="N", help="alternating; two more before are warm-up")
    add("--device", default="cuda", choices=("cuda", "cpu"))


def run(
    folder: str | Path | None = None,
    *,
    shape: str = "mistral-7b",
    weights: str = "bfloat16",
    share: float | None = None,
    prompt: int = 16,
    tokens: int = 64,
    rounds: int = 5,
    device: str = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    """Milliseconds a token of greedy answers, prompt included.

    Args:
        share: with it ``divided`` (:func:`torch_pi2.load` with ``gpu_memory``), ``offloaded`` (accelerate, the dense
            model with as much memory) and ``cpu`` (our steps there); without ``sparse`` and ``dense``, both as a whole
            on the GPU. Of int4 also ``llama.cpp`` with as many blocks there as that memory is of its file, random
            weights in Q4_0, if it was built for GPUs (on the CPU: with none).

    Returns:
        ``ways``, by name: ``ms`` a token, ``spread``, and ``ours_over`` it: how many times as fast our first way is
        within each round; ``same``: of how many rounds the tokens were those of the first way (None: its weights are
        others). ``left_out``: what was not run, and why. ``peers``: what they say of themselves.

    Raises:
        DeviceError: no GPU that has kernels. Pi2Error: the folder cannot be made or loaded.
    """
    import torch_pi2

    at_least(1, prompt=prompt, tokens=tokens, rounds=rounds)
    check_gpu(torch.device(device))
    folder = Path(folder or WORK / f"{shape}-{weights}-0.1")
    if not (folder / "pi2").is_dir():
        torch_pi2.synthetic(folder, shape, active=0.1, weights=weights, seed=seed)
    model: Any = torch_pi2.load(folder)
    subject, memory_bytes = Subject.of(model, folder), None
    peers, left_out = dict[str, Peer](), dict[str, str]()
    if share is None:
        answers = {"sparse": _whole(model.to(device), tokens), "steps": _ours(model, tokens)}
        answers["dense"] = _whole(load_dense(folder).to(device), tokens)
    else:
        inside = sum(tensor.nbytes for home in homes(model) for tensor in home.buffers())
        memory_bytes = rest_bytes(model) + int(share * inside)
        hot_on_gpu(model, memory_bytes)
        answers = {"divided": _eager(model, device, tokens)}
        if importlib.util.find_spec("accelerate") is None:
            left_out["offloaded"] = "package accelerate is not installed"
        else:
            answers["offloaded"] = _eager(_offloaded(load_dense(folder), memory_bytes), device, tokens)
        answers["cpu"] = _ours(torch_pi2.load(folder), tokens)
        gguf, there = folder.parent / f"{subject.stem}.q4_0.gguf", memory_bytes if device == "cuda" else 0
        try:
            peers["llama.cpp"] = _llama(gguf, subject, model.config, there, prompt + tokens, seed)
        except Pi2Error as error:
            left_out["llama.cpp"] = error.found
    drawn = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(model.config.vocab_size, (1, prompt), generator=drawn) for _ in range(rounds + 2)]
    said: dict[tuple[str, int], list[int]] = {}

    def timed(way: str, index: int) -> float:
        if way in peers:
            took = peers[way].round(prompt, tokens)
            return float(took["prompt_s"] + took["decode_s"]) * 1e3 / tokens
        started = time.perf_counter()
        said[way, index] = answers[way](prompts[index])  # a list: the GPU is done
        return (time.perf_counter() - started) * 1e3 / tokens

    try:
        samples = alternate((*answers, *peers), rounds + 2, timed)
    finally:
        for peer in peers.values():
            peer.close()
    head = {"what": "gpu-model", "shape": subject.shape, "weights": subject.weights, "synthetic": subject.synthetic}
    about = {"share": share, "memory_bytes": memory_bytes, "prompt": prompt, "tokens": tokens, "rounds": rounds}
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    told = {"ways": _told(samples, said), "left_out": left_out}
    told |= {"peers": {way: peer.about for way, peer in peers.items()}}
    return {**head, **about, "seed": seed, "device": name, **told, **machine.describe()}


def _told(
    samples: Mapping[str, Sequence[float]], said: Mapping[tuple[str, int], Sequence[int]]
) -> dict[str, dict[str, Any]]:
    """``ways`` of :func:`run`, of milliseconds in each round and, of those with the same weights, tokens; two rounds
    were warm-up."""
    ours, *_ = samples
    ways = {}
    for way, every in samples.items():
        values, mine = every[2:], samples[ours][2:]
        ratios = [theirs / own for theirs, own in zip(values, mine, strict=True)]
        answers = [said[way, i] == said[ours, i] for i in range(len(every)) if (way, i) in said]
        ways[way] = {
            "ms": round(statistics.median(values), 3),
            "ours_over": round(statistics.median(ratios), 3),
            "spread": {"ms": spread(values), "ours_over": spread(ratios)},
            "same": sum(answers) if answers else None,
        }
    return ways


def _settings(tokens: int) -> dict[str, Any]:
    return {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def _ours(model: Any, tokens: int) -> Answer:
    import torch_pi2

    def answer(ids: torch.Tensor) -> list[int]:
        return torch_pi2.generate(model, ids, max_new_tokens=tokens, eos_token_id=[]).sequences[0]

    return answer


def _whole(model: Any, tokens: int) -> Answer:
    from transformers import CompileConfig

    how = {"cache_implementation": "static", "compile_config": CompileConfig(mode="max-autotune", fullgraph=False)}

    def answer(ids: torch.Tensor) -> list[int]:
        there = ids.to(model.device)
        found: list[int] = type(model).generate(model, there, **how, **_settings(tokens))[0, ids.shape[1] :].tolist()
        return found

    return answer


def _eager(model: Any, device: str, tokens: int) -> Answer:
    def answer(ids: torch.Tensor) -> list[int]:
        out = type(model).generate(model, ids.to(device), **_settings(tokens))
        found: list[int] = out[0, ids.shape[1] :].tolist()
        return found

    return answer


def _offloaded(model: Any, memory_bytes: int) -> Any:
    """The dense model, of which accelerate keeps so much on the GPU and brings the rest there in every step."""
    accelerate: Any = importlib.import_module("accelerate")
    most = {0: memory_bytes, "cpu": 1 << 40}
    device_map = accelerate.infer_auto_device_map(model, most, no_split_module_classes=model._no_split_modules)
    return accelerate.dispatch_model(model, device_map)


def _llama(gguf: Path, subject: Subject, config: Any, memory_bytes: int, context: int, seed: int) -> Peer:
    """llama.cpp with so many blocks on the GPU as ``memory_bytes`` are of its file ``gguf``, which is made;
    its head, too, where all have room.

    Raises:
        PeerError, LibraryMissingError: it cannot be run, or there. UnsupportedModelError: it has no such model.
    """
    if subject.weights != "int4":
        raise UnsupportedModelError(
            "llama.cpp beside the model",
            expected="one in int4",
            found="it has 4 bits: compare --weights int4",
            fix="Pass --weights int4.",
        )
    write_gguf(gguf, config, seed=seed)
    blocks = config.num_hidden_layers
    there = min(blocks + 1, int(blocks * memory_bytes / gguf.stat().st_size))
    settings = {"gguf": str(gguf), "threads": torch.get_num_threads(), "context": context + 1, "gpu_layers": there}
    return Peer("benchmarks.peer_llama", settings)


def render(result: dict[str, Any]) -> str:
    rows = way_rows(result["ways"], "ours_over", result["rounds"] + 2, digits=2)
    memory = "" if result["memory_bytes"] is None else f", {common.size(result['memory_bytes'])} of its memory"
    return "\n".join(
        (
            f"{result['shape']} {result['weights']} on {result['device']}{memory}, prompt {result['prompt']}, answer "
            f"{result['tokens']}",
            common.table(("way", "ms a token", "from - to", "ours over it", "from - to", "same"), rows),
            *(f"not run: {name}, {why}" for name, why in result["left_out"].items()),
            f"({result['synthetic']})",
        )
    )
