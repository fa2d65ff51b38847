"""llama.cpp as a peer: ``llama_decode`` of the PyPI package llama-cpp-python on a GGUF file, without sampling."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import cap
from benchmarks.peer import Round, serve

#: Levels of ggml's log that are shown: warning and error.
_PROBLEMS = (3, 4)
#: Kept: the library only has its address.
_log_problems: Any = None


def load(settings: Mapping[str, Any]) -> tuple[dict[str, Any], Round]:
    """``settings``: gguf (path), threads, context (tokens of a sequence), batches (numbers of sequences; [1]).

    Defaults of llama.cpp otherwise: mmap, repacked weights. Sequences of a batch are fed in one call; each number of
    them has a context of its own. With ``repack`` false weights stay in the mapped file (repacked they are anonymous
    memory, as much again); with ``cap`` (folder of a group) the process joins that group first.
    """
    if settings.get("cap"):
        cap.join(settings["cap"])
    begun = time.perf_counter()
    import llama_cpp

    path, threads, context = settings["gguf"], settings["threads"], settings["context"]
    repack = settings.get("repack", True)
    started, batches = time.perf_counter(), settings.get("batches", [1])
    model = _model(llama_cpp, path, repack)
    contexts = {batch: _context(llama_cpp, model, batch, context, threads) for batch in batches}
    loaded = time.perf_counter()

    def run_round(prompt: int, tokens: int, batch: int) -> dict[str, Any]:
        lcontext = contexts[batch]
        memory = llama_cpp.llama_get_memory(lcontext)

        def feed(part: Any) -> None:
            failed = llama_cpp.llama_decode(lcontext, part)
            if failed:
                raise RuntimeError(f"llama_decode returned {failed}")
            llama_cpp.llama_get_logits(lcontext)  # waits for the result

        one, whole = _filled(llama_cpp, batch, 0, 1), _filled(llama_cpp, batch, 0, prompt)
        steps = [_filled(llama_cpp, batch, prompt + i, 1) for i in range(tokens)]
        # One token first: pages that the kernel has reclaimed since the last round come back before the clock starts.
        llama_cpp.llama_memory_clear(memory, True)
        feed(one)
        llama_cpp.llama_memory_clear(memory, True)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        started = time.perf_counter()
        feed(whole)
        disk = cap.read_bytes()
        between = time.perf_counter()
        for step in steps:
            feed(step)
        ended = time.perf_counter()
        after = cap.read_bytes()
        for part in (one, whole, *steps):
            llama_cpp.llama_batch_free(part)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "prompt_s": between - started,
            "decode_s": ended - between,
            "peak_rss_bytes": usage.ru_maxrss * 1024,
            "major_faults": usage.ru_majflt - faults,
            "disk_bytes": None if disk is None or after is None else after - disk,
        }

    about = {
        "engine": f"llama.cpp (llama-cpp-python {llama_cpp.__version__})",
        "weights": f"Q4_0, every matrix, mmap, {'repacked as llama.cpp chooses' if repack else 'not repacked'}",
        "bytes": Path(path).stat().st_size,
        "threads": threads,
        "context": context,
        "load_s": loaded - started,
        "first_load_s": loaded - begun,
        "system": llama_cpp.llama_print_system_info().decode().strip(),
    }
    return about, run_round


def _model(llama_cpp: Any, path: str, repack: bool) -> Any:
    """The model of a file. Raises RuntimeError: it cannot be loaded, for what the log says."""

    @llama_cpp.llama_log_callback
    def log_problems(level: int, text: bytes, _user_data: Any) -> None:
        if level in _PROBLEMS:
            sys.stderr.write(text.decode(errors="replace"))

    global _log_problems
    _log_problems = log_problems
    llama_cpp.llama_log_set(_log_problems, None)
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    if not repack:
        _map_only(llama_cpp, params)
    model = llama_cpp.llama_model_load_from_file(path.encode(), params)
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {path}")
    return model


def _context(llama_cpp: Any, model: Any, batch: int, tokens: int, threads: int) -> Any:
    """For ``batch`` sequences of ``tokens``. Raises RuntimeError: there is none, for what its log says."""
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = batch * tokens
    params.n_threads = params.n_threads_batch = threads
    params.n_seq_max = batch
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError(f"llama.cpp makes no context for {batch} sequences of {tokens} tokens")
    return context


def _filled(llama_cpp: Any, batch: int, start: int, count: int) -> Any:
    """``count`` tokens for each of ``batch`` sequences from position ``start``, logits of the last; to be freed."""
    filled = llama_cpp.llama_batch_init(batch * count, 0, 1)
    filled.n_tokens = batch * count
    for i in range(batch * count):
        sequence, place = divmod(i, count)
        filled.token[i], filled.pos[i] = 1 + (start + place) % 100, start + place
        filled.n_seq_id[i], filled.seq_id[i][0] = 1, sequence
        filled.logits[i] = place == count - 1
    return filled


def _map_only(llama_cpp: Any, params: Any) -> None:
    """Set ``params`` to mmap without repacking. Raises RuntimeError: this version has no such switch."""
    if not hasattr(params, "use_extra_bufts"):
        raise RuntimeError(f"llama-cpp-python {llama_cpp.__version__} cannot switch repacking off; install a newer one")
    params.use_extra_bufts = False
    if hasattr(params, "load_mode"):  # instead of use_mmap in newer versions
        params.load_mode = llama_cpp.LLAMA_LOAD_MODE_MMAP
    else:
        params.use_mmap = True


if __name__ == "__main__":
    serve(load)
