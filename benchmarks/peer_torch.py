"""PyTorch as a peer: the dense equivalent of a model folder in bfloat16, its decoding step compiled by Inductor."""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.peer import Round, serve


def load(settings: Mapping[str, Any]) -> tuple[dict[str, Any], Round]:
    """``settings``: folder (of a quantised model), threads, context (tokens), batches (numbers of sequences)."""
    import torch

    from torch_pi2.checkpoint.save_load import load_dense
    from torch_pi2.decode.decoder import Decoder

    torch.set_num_threads(settings["threads"])
    model: Any = load_dense(settings["folder"], dtype=torch.bfloat16)
    decoders = {
        batch: Decoder(model, max_tokens=settings["context"], batch=batch, backend="inductor")
        for batch in settings["batches"]
    }
    vocabulary = model.get_input_embeddings().num_embeddings

    def run_round(prompt: int, tokens: int, batch: int) -> dict[str, Any]:
        decoder = decoders[batch]
        ids_BT = torch.arange(prompt).remainder(vocabulary).repeat(batch, 1)
        started = time.perf_counter()
        next_B1 = decoder.prompt(ids_BT)
        between = time.perf_counter()
        for _ in range(tokens):
            next_B1 = decoder.step(next_B1)
        ended = time.perf_counter()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"prompt_s": between - started, "decode_s": ended - between, "peak_rss_bytes": peak}

    for batch in decoders:
        run_round(min(8, settings["context"] - 2), 1, batch)  # compiles
    about = {
        "engine": f"torch {torch.__version__}, compiled step (Inductor), dense",
        "weights": "bfloat16",
        "bytes": sum(p.nbytes for p in model.parameters()),
        "threads": torch.get_num_threads(),
        "context": settings["context"],
    }
    return about, run_round


if __name__ == "__main__":
    serve(load)
