"""What layers on a GPU need: kernels that can run there, and all of their tensors."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch import nn

from torch_pi2.base.offloaded import OffloadedParameter
from torch_pi2.base.package import how_to_install
from torch_pi2.errors import DeviceError
from torch_pi2.formats import has_two_formats

#: The oldest architecture that Triton compiles for (Volta), as torch has it.
LEAST_CAPABILITY = (7, 0)


def on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def device_of(model: nn.Module) -> torch.device:
    """Where the parameters of ``model`` are: a GPU, or else the CPU. Of a divided one that is the GPU.

    Raises:
        DeviceError: on several GPUs, or some on the CPU.
    """
    held = [parameter for parameter in model.parameters() if not isinstance(parameter, OffloadedParameter)]
    devices = {parameter.device for parameter in held if on_gpu(parameter) or not parameter.is_meta}
    if not any(map(on_gpu, held)):
        return torch.device("cpu")
    if len(devices) > 1:
        raise DeviceError(
            f"device of {type(model).__name__}",
            expected="the CPU, or one GPU",
            found=", ".join(sorted(map(str, devices))),
            fix="Load it without device_map, and move it with model.to(device).",
        )
    return devices.pop()


def check_gpu(device: torch.device) -> None:
    """Raises DeviceError where no kernel of ours can run: an old GPU, none, or no Triton."""
    if importlib.util.find_spec("triton") is None:
        raise DeviceError(
            "layers on a GPU",
            expected="Triton",
            found="it is not installed",
            fix=f"{how_to_install('gpu')}, or leave the model on the CPU.",
        )
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError(
            "layers on a GPU",
            expected="a GPU, and a torch that was built for it",
            found=f"torch {torch.__version__}, which sees none",
            fix="Leave the model on the CPU.",
        )
    if device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
        raise DeviceError(
            f"layers on {device}",
            expected=f"torch's current GPU, cuda:{torch.cuda.current_device()}, where Triton starts kernels",
            found=str(device),
            fix=f"Call torch.cuda.set_device({device.index}) first.",
        )
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        major, minor = torch.cuda.get_device_capability(device)
        raise DeviceError(
            f"layers on {torch.cuda.get_device_name(device)}",
            expected="compute capability {}.{} or later".format(*LEAST_CAPABILITY),
            found=f"{major}.{minor}",
            fix="Leave the model on the CPU.",
        )


def goes_to_gpu(fn: Callable[[torch.Tensor], torch.Tensor], here: torch.Tensor) -> bool:
    """Whether ``fn``, which a module's ``_apply`` was given, moves tensors to a GPU from elsewhere.

    Raises:
        DeviceError: see :func:`check_gpu`.
    """
    moved = fn(torch.empty(0, dtype=torch.float32, device=here.device))
    if not on_gpu(moved) or on_gpu(here):
        return False
    check_gpu(moved.device)
    return True


def stays(what: str) -> DeviceError:
    """For what has no kernels on a GPU."""
    return DeviceError(
        what,
        expected="it on the CPU",
        found="a move to a GPU, for which it has no kernels",
        fix="Leave this model on the CPU.",
    )


def check_gpu_has_format(key: str, weights: str) -> None:
    """Raises DeviceError for neurons of two formats, which no kernel on a GPU reads."""
    if has_two_formats(weights):
        raise stays(f"{key}, whose neurons are {weights}")


def check_together(key: str, x: torch.Tensor, rows: torch.Tensor) -> None:
    """Raises DeviceError unless input and neurons are on one device. A layer that is only tried has none (meta)."""
    if x.device != rows.device and not rows.is_meta:
        raise DeviceError(
            f"input of {key}",
            expected=f"{rows.device}, where its neurons are",
            found=str(x.device),
            fix="Move the model and its inputs to one device.",
        )
