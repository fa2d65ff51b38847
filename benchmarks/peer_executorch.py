"""ExecuTorch as a peer: a program of its own Llama export (:mod:`benchmarks.executorch_llama`) in its Python runtime.

Prompts go by ``forward`` in pieces of as many tokens as it takes, answers token by token, each the most likely one.
"""

from __future__ import annotations

import importlib.metadata
import resource
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.peer import Round, serve


def load(settings: Mapping[str, Any]) -> tuple[dict[str, Any], Round]:
    """``settings``: program (path), threads. One sequence."""
    import executorch.kernels.quantized  # noqa: F401  its kernels: 4-bit embeddings
    import torch
    from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401  its kernels: attention, keys and values
    from executorch.extension.pybindings import portable_lib
    from executorch.runtime import Runtime

    portable_lib._threadpool_get_thread_count()  # starts it
    portable_lib._unsafe_reset_threadpool(settings["threads"])
    program = Runtime.get().load_program(settings["program"])
    context = program.load_method("get_max_context_len").execute([])[0]
    method = program.load_method("forward")
    piece = method.metadata.input_tensor_meta(0).sizes()[1]

    def forward(ids_1T: Any, position: int) -> Any:
        logits_1V = method.execute([ids_1T, torch.tensor([position])])[0]
        return logits_1V.argmax(-1, keepdim=True)

    def run_round(prompt: int, tokens: int, batch: int) -> dict[str, Any]:
        if batch != 1 or prompt + tokens > context:
            raise RuntimeError(f"the program has one sequence of {context} tokens, not {batch} of {prompt + tokens}")
        ids_1T = 1 + torch.arange(prompt)[None] % 100
        started = time.perf_counter()
        for first in range(0, prompt, piece):
            next_11 = forward(ids_1T[:, first : first + piece], first)
        between = time.perf_counter()
        for step in range(tokens):
            next_11 = forward(next_11, prompt + step)
        ended = time.perf_counter()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"prompt_s": between - started, "decode_s": ended - between, "peak_rss_bytes": peak}

    run_round(min(8, context - 2), 1, 1)  # packs weights
    about = {
        "engine": f"ExecuTorch {importlib.metadata.version('executorch')}, its own Llama export on XNNPACK, dense",
        "weights": "8da4w in groups of 32, every matrix",
        "bytes": Path(settings["program"]).stat().st_size,
        "threads": portable_lib._threadpool_get_thread_count(),
        "context": context,
    }
    return about, run_round


if __name__ == "__main__":
    serve(load)
