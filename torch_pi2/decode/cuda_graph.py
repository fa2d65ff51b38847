"""``captured``: a step as one CUDA graph, whose kernels a GPU starts without waiting for the CPU.

A step of a small model is hundreds of kernels of a few microseconds each: launched one by one, a GPU waits for them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from torch_pi2.base.warn import log_once
from torch_pi2.layers.gpu import on_gpu

Forward = Callable[[torch.Tensor], torch.Tensor]


def captured(run: Forward, ids_BT: torch.Tensor) -> Forward:
    """``run`` for ids like these as one CUDA graph; or ``run`` itself: ids are not on a GPU, or it cannot be captured.

    It must have run before, so that its kernels are compiled and loaded, and read and write the same memory each time
    but for the ids. Nothing is computed here: a capture writes down what kernels would be started.
    """
    if not on_gpu(ids_BT):
        return run
    fed_BT, graph = ids_BT.clone(), torch.cuda.CUDAGraph()
    try:
        # other threads may do with the GPU what they want meanwhile
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            result = run(fed_BT)
    except Exception as error:
        log_once(f"steps are not captured as CUDA graphs: {' '.join(str(error).split())[:200]}")
        return run

    def replay(ids_BT: torch.Tensor) -> torch.Tensor:
        fed_BT.copy_(ids_BT)
        graph.replay()
        return result.clone()  # the next replay writes there

    return replay
