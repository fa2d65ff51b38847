"""OpenVINO GenAI as a peer: ``LLMPipeline`` on a GGUF file, the most likely token each time, without a tokenizer."""

from __future__ import annotations

import resource
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.peer import Round, serve


def load(settings: Mapping[str, Any]) -> tuple[dict[str, Any], Round]:
    """``settings``: gguf (path), threads, context (tokens of a sequence), batches (numbers of sequences).

    Its defaults otherwise. Times are those of its forward passes: picking tokens does not count.
    """
    import numpy as np
    import openvino
    import openvino_genai

    with tempfile.TemporaryDirectory() as empty:  # random weights have no words
        tokenizer = openvino_genai.Tokenizer(empty)
    # Stateful: its other engine keeps what it has read of a prompt, and would not read the same one again.
    how = {"INFERENCE_NUM_THREADS": settings["threads"], "ATTENTION_BACKEND": "SDPA"}
    try:
        pipeline = openvino_genai.LLMPipeline(settings["gguf"], tokenizer, "CPU", **how)
    except (IndexError, RuntimeError) as error:  # e.g. "map::at" for mixtures of experts
        raise RuntimeError(f"OpenVINO GenAI cannot read {settings['gguf']}: {error}") from error

    def run_round(prompt: int, tokens: int, batch: int) -> dict[str, Any]:
        choice = openvino_genai.GenerationConfig()
        choice.do_sample, choice.ignore_eos = False, True
        choice.eos_token_id, choice.stop_token_ids = 0, {0}
        choice.min_new_tokens = choice.max_new_tokens = tokens + 1  # the first is the prompt's
        ids_BT = np.tile(np.arange(prompt, dtype=np.int64) % 100 + 1, (batch, 1))
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids_BT), openvino.Tensor(np.ones_like(ids_BT)))
        passes_us = pipeline.generate(inputs, choice).perf_metrics.raw_metrics.token_infer_durations
        if len(passes_us) != tokens + 1:
            raise RuntimeError(f"OpenVINO GenAI timed {len(passes_us)} passes, not {tokens + 1}")
        return {
            "prompt_s": passes_us[0] / 1e6,
            "decode_s": sum(passes_us[1:]) / 1e6,
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }

    about = {
        "engine": f"OpenVINO GenAI {openvino_genai.__version__}",
        "weights": "Q4_0 as it converts it, every matrix",
        "bytes": Path(settings["gguf"]).stat().st_size,
        "threads": settings["threads"],
        "context": settings["context"],
    }
    return about, run_round


if __name__ == "__main__":
    serve(load)
