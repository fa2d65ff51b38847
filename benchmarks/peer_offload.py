"""Our engine over a neuron store in a process of its own, whose memory is that of one mode and can be capped."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import cap
from benchmarks.peer import Round, serve


def load(settings: Mapping[str, Any]) -> tuple[dict[str, Any], Round]:
    """``settings``: threads; folder, budget (bytes), offload (fields of OffloadConfig), activations, context, compiled,
    seed, topics (tokens stay with a topic for a while, else they are independent), cap (folder of a group, or None) and
    trace (file for a trace of the last round without a prompt, or None). Without ``folder`` nothing is loaded, and
    ``about`` has the memory of a process before it loads a model. group: of a process that has a shard, its rank,
    ranks, reduction, and address and port of the first; all of them are asked the same at the same time.

    A round without a prompt continues the last one. The inputs are drawn tokens, not the model's own (``said`` of a
    round; :class:`~torch_pi2.store.synthetic.TokenStream`).
    """
    if settings.get("cap"):
        cap.join(settings["cap"])
    import torch
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1  # a pool of compilers would be under the cap as well
    import torch._inductor.compile_fx
    from transformers import AutoModelForCausalLM  # noqa: F401 imported by what loads a model: counts as overhead

    import torch_pi2
    from benchmarks.subject import Subject
    from torch_pi2.decode.decoder import Decoder
    from torch_pi2.observe import timings
    from torch_pi2.observe.steps import timed_steps
    from torch_pi2.observe.trace import trace
    from torch_pi2.ops import load as load_library
    from torch_pi2.store.synthetic import TokenStream
    from torch_pi2.types.offload import OffloadConfig

    torch.set_num_threads(settings["threads"])
    load_library()
    about: dict[str, Any] = {"base_rss_bytes": cap.peak_rss_bytes()}
    if "folder" not in settings:
        return about, lambda _prompt, _tokens, _one: {}
    if (group := settings.get("group")) is not None:
        import torch.distributed as dist

        where = f"tcp://{group['address']}:{group['port']}"
        dist.init_process_group("gloo", init_method=where, rank=group["rank"], world_size=group["ranks"])
    model: Any = torch_pi2.load(
        settings["folder"],
        group=None if group is None else torch_pi2.GroupConfig(group["reduction"], 300.0),
        activations=settings["activations"],
        budget=settings["budget"],
        offload=OffloadConfig(**settings["offload"]),
        context=settings["context"],
    )
    pieces = settings.get("chunk_tokens", 0)
    store, budget = model.torch_pi2.store, model.torch_pi2.budget
    decoder = Decoder(model, max_tokens=settings["context"], compiled=settings["compiled"], chunk_tokens=pieces)
    vocabulary = model.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(settings["seed"])
    stream = TokenStream(vocabulary, topics=settings["topics"], generator=generator)

    def drawn(tokens: int) -> torch.Tensor:
        return stream.draw(tokens)[None]

    def run_round(prompt: int, tokens: int, _one: int) -> dict[str, Any]:
        store.stats(reset=True)
        started = time.perf_counter()
        if prompt:
            decoder.prompt(drawn(prompt))
        prompt_s, prompt_stats = time.perf_counter() - started, store.stats()
        inputs_T11 = [drawn(1) for _ in range(tokens)]
        store.stats(reset=True)
        disk = cap.read_bytes()
        recorded = trace(settings["trace"]) if settings["trace"] and not prompt else None
        if recorded:
            recorded.start()
        steps = [timed_steps(decoder, next_11) for next_11 in inputs_T11]
        after = cap.read_bytes()
        figures = {
            "prompt_s": prompt_s,
            "prompt_stats": prompt_stats,
            "step_s": [step.seconds for step in steps],
            "said": [int(answer) for step in steps for answer in step.answers],
            "stats": store.stats(),
            "ffn_s": sum(step.ms(timings.FFN) for step in steps) / 1e3,
            "disk_bytes": None if disk is None or after is None else after - disk,
            "peak_rss_bytes": cap.peak_rss_bytes(),
        }
        if recorded:
            recorded.stop()
        return {**figures, "trace": recorded and recorded.summary()}

    about |= {
        "subject": asdict(Subject.of(model, Path(settings["folder"]))),
        "reads": store.describe(),
        "budget": asdict(budget),
        "vocabulary": vocabulary,
    }
    return about, run_round


if __name__ == "__main__":
    serve(load)
