"""A model and a Decoder on a device that is made up: nothing is computed, but tensors of two devices cannot meet.

``python made_up_device.py``: prints, by model, where results of prompts and steps are, as JSON. Torch knows the device
as a backend of Python's, which a process can have one of.
"""

from __future__ import annotations

import json

import torch
from tiny_models import tiny
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import torch_pi2
from torch_pi2.base.offloaded import OffloadedParameter
from torch_pi2.decode import attention, decoder
from torch_pi2.decode.decoder import Decoder
from torch_pi2.layers import gpu

DEVICE = "npy"


def is_there(tensor: torch.Tensor) -> bool:
    return tensor.device.type == DEVICE


def move(model: nn.Module) -> None:
    """Every tensor of ``model`` is one of the device's, without values. (``model.to`` would want values.)"""
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None and not isinstance(tensor, OffloadedParameter):
                    moved = torch.empty(tensor.shape, dtype=tensor.dtype, device=DEVICE)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    held[name] = nn.Parameter(moved, requires_grad=False) if is_parameter else moved


def places(model: nn.Module) -> list[str]:
    """Of results of all that a Decoder does."""
    ids = torch.zeros(1, 12, dtype=torch.int64)
    found, decoder = list[torch.Tensor](), Decoder(model, max_tokens=32, batch=3, compiled=False, logits=True)
    found.append(decoder.prompt(ids[:, :5]))
    found.append(decoder.step(ids[:, :1]))
    found.append(decoder.verify(ids[:, :3]))
    decoder.rollback(1)
    for _ in decoder.add(ids):
        pass
    found.append(decoder.step(ids[:, :1].expand(2, 1)))
    found.extend(decoder._kv._memory[0].tensors())
    return [str(tensor.device) for tensor in found]


if __name__ == "__main__":
    _setup_privateuseone_for_python_backend(DEVICE)
    gpu.on_gpu = attention.on_gpu = is_there
    decoder.check_vocabulary = lambda *_args: None  # of tokens that have no values
    decoder._checked = lambda result: result
    models = {name: tiny(name) for name in ("llama", "opt")}
    models["sparse"] = torch_pi2.optimize(tiny("drelu"))
    with FakeTensorMode(allow_non_fake_inputs=True):
        for model in models.values():
            move(model)
        print(json.dumps({name: places(model) for name, model in models.items()}))
