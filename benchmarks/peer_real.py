"""Losses of llama.cpp and torch_pi2 on given tokens, and torch_pi2's speed as :mod:`benchmarks.peer_llama` has its."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

import torch_pi2
from benchmarks import peer_llama
from benchmarks.peer import Round, serve
from torch_pi2.decode.decoder import Decoder
from torch_pi2.decode.kv_cache import cache_name

#: Logits of consecutive pieces of a window, each [T, V].
Logits = Callable[[Sequence[int]], Iterator[torch.Tensor]]


def load(settings: Mapping[str, Any]) -> tuple[dict[str, Any], Round]:
    """``settings``: gguf (path), threads, context (tokens of a sequence).

    With windows (of token ids) the first answer is that of :func:`loss_of`, and all. activations: None for llama.cpp's.
    """
    torch.set_num_threads(settings["threads"])
    if "windows" in settings:
        engine = _llama(settings) if settings["activations"] is None else ours(_model(settings), settings["piece"])
        return loss_of(engine, settings["windows"], settings["piece"]), lambda *_: {}
    begun = time.perf_counter()
    _model(settings)  # with what it imports
    started = time.perf_counter()
    decoder = Decoder(_model(settings), max_tokens=settings["context"], compiled=False)
    loaded = time.perf_counter()

    def run_round(prompt: int, tokens: int, batch: int) -> dict[str, Any]:
        ids_BT = 1 + torch.arange(prompt + tokens).remainder(100).expand(batch, -1)  # those of peer_llama
        started = time.perf_counter()
        decoder.prompt(ids_BT[:, :prompt])
        between = time.perf_counter()
        for place in range(prompt, prompt + tokens):
            decoder.step(ids_BT[:, place : place + 1])
        return {"prompt_s": between - started, "decode_s": time.perf_counter() - between}

    return {"load_s": loaded - started, "first_load_s": started - begun}, run_round


def _model(settings: Mapping[str, Any]) -> Any:
    chosen = {key: settings[key] for key in ("activations",) if key in settings}
    return torch_pi2.load(settings["gguf"], **chosen)


def loss_of(logits_of: Logits, windows: Iterable[Sequence[int]], piece: int) -> dict[str, Any]:
    """``loss`` (nats a token; the first of each window is not scored) and ``best`` (the likeliest ids)."""
    loss, best = 0.0, list[int]()
    for window in windows:
        for logits_TV, target_T in zip(logits_of(window[:-1]), torch.tensor(window[1:]).split(piece), strict=True):
            loss += float(torch.nn.functional.cross_entropy(logits_TV.float(), target_T, reduction="sum"))
            best += logits_TV.argmax(-1).tolist()
    return {"loss": loss / len(best), "best": best}


def ours(model: Any, piece: int) -> Logits:
    """By the model's own forward, ``piece`` tokens at once."""
    from transformers import DynamicCache

    def logits_of(window: Sequence[int]) -> Iterator[torch.Tensor]:
        cached = {cache_name(model): DynamicCache(config=model.config)}
        for ids_T in torch.tensor(window).split(piece):
            with torch.inference_mode():
                yield model(input_ids=ids_T[None], use_cache=True, **cached).logits[0]

    return logits_of


def llama(file: str, threads: int, tokens: int) -> Callable[[Sequence[int], int], torch.Tensor]:
    """Feeds tokens at a position (0: of a new sequence of at most ``tokens``); their logits [T, V] until the next."""
    import llama_cpp
    import numpy

    model = peer_llama._model(llama_cpp, file, True)
    context = peer_llama._context(llama_cpp, model, 1, tokens, threads)
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def feed(ids: Sequence[int], start: int) -> torch.Tensor:
        if not start:
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        batch = peer_llama._filled(llama_cpp, 1, start, len(ids))
        for place, token in enumerate(ids):
            batch.token[place], batch.logits[place] = token, True
        failed = llama_cpp.llama_decode(context, batch)
        llama_cpp.llama_batch_free(batch)
        if failed:
            raise RuntimeError(f"llama_decode returned {failed}")
        found = llama_cpp.llama_get_logits(context)
        return torch.from_numpy(numpy.ctypeslib.as_array(found, (len(ids), vocabulary)))

    return feed


def _llama(settings: Mapping[str, Any]) -> Logits:
    piece = settings["piece"]
    feed = llama(settings["gguf"], settings["threads"], max(map(len, settings["windows"])))
    return lambda window: (feed(window[at : at + piece], at) for at in range(0, len(window), piece))


if __name__ == "__main__":
    serve(load)
