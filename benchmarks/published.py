"""Writes the hardware profiles of ``torch_pi2/machine/profiles``: ``python -m benchmarks.published``.

They are published figures, not our measurements; ``notes`` has the source or the assumption behind each figure. Their
storage is a simulated device of :mod:`torch_pi2.machine.device`.
"""

from __future__ import annotations

from itertools import product

from torch_pi2.machine.device import Device, find_device
from torch_pi2.machine.find import PRESETS
from torch_pi2.machine.hardware import KERNELS, Accelerator, Hardware, Kernel, Line
from torch_pi2.machine.reads import ReadRate, Reads, monotone, six_digits

_P = "PowerInfer-2, arXiv 2406.06282v3"
#: Weights of the linear layers of Mistral-7B, of which Bamboo-7B has the sizes: 32 layers and the head.
_WEIGHTS_7B = 32 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336) + 4096 * 32000
_CPU_PROMPT = 8.0  # tokens a second, 7B INT4
_NPU_PROMPT = 770.0
_CPU_GB_PER_S, _NPU_GB_PER_S, _BOTH_GB_PER_S = 43.9, 56.0, 59.6
_TOKENS = (1, 2, 4, 8, 16, 32)
_KIB, _MIB = 1 << 10, 1 << 20
_BLOCKS = (4 * _KIB, 8 * _KIB, 16 * _KIB, 32 * _KIB, 64 * _KIB, 256 * _KIB, 512 * _KIB)
_RANGES = (128 * _MIB, 512 * _MIB)
_DEPTHS = (1, 2, 4, 8, 16, 32)
_READS = 4000


def sm8650() -> Hardware:
    notes = {
        "cores": f"{_P}: Snapdragon 8 Gen 3, 1 big, 5 mid and 2 little cores",
        "threads": f"{_P}: compares six CPU cores with the NPU; assumed: the big and the mid ones",
        "memory_bytes": f"{_P}, Table 3: OnePlus 12, 19 GB of 24 available",
        "memory_gb_per_s": f"{_P}: 43.9 GB/s, CPU alone; gathered as well: its LLMFlash reads so much (Table 2)",
        "kernels": f"{_P}: bytes at 43.9 GB/s; {_CPU_PROMPT:g} tokens/s of a 7B INT4 prompt on the CPU. Assumed: one "
        "token costs bytes alone, of n tokens the share 1 - 1/n of the multiplications beside them; 5 us a call; every "
        "format alike",
        "reads": f"{_P}: UFS 4.0, through the device ufs-4.0 (docs/DEVICES.md: what of it is assumed). Assumed: reads "
        "run on a core that does not compute",
        "store": "assumed: nothing beside the drive",
        "accelerator": f"{_P}: 56 GB/s alone, 59.6 GB/s with the CPU; {_NPU_PROMPT:g} tokens/s of a 7B INT4 prompt. "
        "Memory is the phone's (Table 3: 19 GB). Assumed: 60 us to begin a call and to wait for its end, 5 us to merge",
    }
    return Hardware(
        name="sm8650-ufs4.0",
        source="published",
        machine={"paper": _P},
        versions={},
        notes=notes,
        cores=8,
        threads=6,
        memory_bytes=int(19e9),
        memory_gb_per_s=_CPU_GB_PER_S,
        kernels=dict.fromkeys(KERNELS, _kernel(_CPU_GB_PER_S, _CPU_PROMPT * _WEIGHTS_7B)),
        reads=device_reads(find_device("ufs-4.0")),
        accelerator=Accelerator(
            name="Hexagon NPU of Snapdragon 8 Gen 3",
            memory_bytes=int(19e9),
            launch_us=60.0,
            stream_gb_per_s=_NPU_GB_PER_S,
            shared_gb_per_s=_BOTH_GB_PER_S,
            gmacs_per_s=six_digits(_NPU_PROMPT * _WEIGHTS_7B / 1e9),
            merge_us=5.0,
        ),
    )


def _kernel(gb_per_s: float, macs_per_s: float) -> Kernel:
    def line(tokens: int, *, cold: bool = True) -> Line:
        mb = six_digits(1e3 / gb_per_s)
        macs = six_digits((1 - 1 / tokens) * 1e12 / macs_per_s)
        return Line(tokens, 5.0, mb, mb if cold else 0.0, mb if cold else 0.0, macs, 0.0)

    sparse, dense = (tuple(line(n, cold=cold) for n in _TOKENS) for cold in (True, False))
    return Kernel(sparse, dense, dense)


def device_reads(device: Device) -> Reads:
    """Closed-loop read rates of a simulated device: random by size, range and depth, and sequential."""

    def per_s(block: int, range_bytes: int, depth: int, *, sequential: bool = False) -> float:
        step = block if sequential else 3 * block
        times = device.read_times(range(0, _READS * step, step), [block] * _READS, depth=depth, range_bytes=range_bytes)
        return six_digits(_READS / float(times[-1]))

    rows = monotone([ReadRate(*at, reads_per_s=per_s(*at)) for at in product(_BLOCKS, _RANGES, _DEPTHS)])
    stream = per_s(512 * _KIB, 512 * _MIB, 32, sequential=True) * 512 * _KIB / 1e9
    return Reads(
        engine="pread",
        direct=True,
        warm=True,
        file_bytes=_RANGES[-1],
        stream_gb_per_s=six_digits(stream),
        cpu_us_per_read=0.0,
        rates=rows,
    )


if __name__ == "__main__":
    sm8650().save(PRESETS["sm8650-ufs4.0"])
