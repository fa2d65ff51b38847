"""``captured``: a step as one CUDA graph, whose kernels a GPU starts without waiting for the CPU.

A step of a small model is hundreds of kernels of a few microseconds each: launched one by one, a GPU waits for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from torch_pi2.base.warn import log_once
from torch_pi2.layers.gpu import on_gpu

Forward = Callable[[torch.Tensor], torch.Tensor]

#: One capture at a time: another would wait for all that the GPU does, which a capture forbids.
_lock = threading.Lock()


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Within it kernels are started on ``device``, whichever GPU is this thread's current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def captured(run: Forward, ids_BT: torch.Tensor) -> Forward:
    """``run`` for ids like these as one CUDA graph; or ``run`` itself: ids are not on a GPU, or it cannot be captured.

    It must have run before, so that its kernels are compiled and loaded, and read and write the same memory each time
    but for the ids. Nothing is computed here: a capture writes down what kernels would be started.
    """
    if not on_gpu(ids_BT):
        return run
    fed_BT, graph = ids_BT.clone(), torch.cuda.CUDAGraph()
    # An error within leaves the graph's stream the current one: the outer block does not. Other threads may do with the
    # GPU what they want meanwhile.
    here = torch.cuda.stream(torch.cuda.current_stream(ids_BT.device))
    try:
        with _lock, here, torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
            result = run(fed_BT)
    except Exception as error:
        log_once(f"steps are not captured as CUDA graphs: {' '.join(str(error).split())[:200]}")
        return run

    def replay(ids_BT: torch.Tensor, held: Forward = run) -> torch.Tensor:
        """``held``: what the graph has the addresses of."""
        fed_BT.copy_(ids_BT)
        graph.replay()
        return result.clone()  # the next replay writes there

    return replay
