"""A tiny bundle made by hand: a one-layer decoder with keys and values, all of it on XNNPACK, and a text tokenizer.

It has the methods and the manifest that the exporter writes, so that what runs bundles is tested without exporting a
model. Its model.pi2 is not read by the program.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from shared import shared_folder
from tiny_tokenizers import TEXT, byte_tokenizer
from torch import nn

from torch_pi2.export.manifest import CONTEXT_METHOD, Manifest, MethodEntry, Model, describe_files

VOCAB, WIDTH, ROOM, PROMPT, LANES = 300, 16, 40, 8, 4
EOS = 0
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


class TinyDecoder(nn.Module):
    """One attention layer, one head; logits of what was read so far."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.place = nn.Embedding(ROOM, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.register_buffer("keys", torch.zeros(LANES, ROOM, WIDTH))
        self.register_buffer("values", torch.zeros(LANES, ROOM, WIDTH))

    def attend(self, x_NTH: torch.Tensor, lanes_N: torch.Tensor, positions_NT: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x_NTH).split(WIDTH, dim=-1)
        rows = lanes_N[:, None].expand_as(positions_NT)
        self.keys.index_put_((rows, positions_NT), k)
        self.values.index_put_((rows, positions_NT), v)
        keys, values = self.keys.index_select(0, lanes_N), self.values.index_select(0, lanes_N)
        seen = torch.arange(ROOM)[None, None] <= positions_NT[..., None]
        scores = (q @ keys.transpose(1, 2) / WIDTH**0.5).masked_fill(~seen, float("-inf"))
        return x_NTH + torch.softmax(scores, -1) @ values

    def logits(self, ids_NT: torch.Tensor, positions_NT: torch.Tensor, lanes_N: torch.Tensor) -> torch.Tensor:
        x_NTH = self.embed(ids_NT) + self.place(positions_NT)
        return self.head(self.attend(x_NTH, lanes_N, positions_NT)[:, -1:]) * 4


class Forward(nn.Module):
    def __init__(self, model: TinyDecoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        positions = (start % ROOM + torch.arange(ids.shape[1]))[None]
        return self.model.logits(ids, positions, torch.div(start, ROOM, rounding_mode="floor"))


class Decode(nn.Module):
    def __init__(self, model: TinyDecoder, batch: int) -> None:
        super().__init__()
        self.model, self.batch = model, batch

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.model.logits(ids, positions, torch.arange(self.batch))


class Fork(nn.Module):
    def __init__(self, model: TinyDecoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, lanes: torch.Tensor) -> torch.Tensor:
        for buffer in (self.model.keys, self.model.values):
            buffer.copy_(buffer.index_select(0, lanes))
        return lanes + 0


def write_program(path: Path, batches: tuple[int, ...] = (1, 2, 4)) -> None:
    """The program of :class:`TinyDecoder`, with its methods; only decode_b1 has delegates: they take long to lower."""
    from executorch.backends.xnnpack.partition.config.gemm_configs import LinearConfig
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge_transform_and_lower
    from executorch.exir.passes import MemoryPlanningPass

    model = TinyDecoder().eval()
    one = torch.zeros(1, dtype=torch.int64)
    length = torch.export.Dim("length", min=1, max=PROMPT)
    ids = torch.arange(4)[None]
    programs = {
        "forward": torch.export.export(Forward(model), (ids, one), dynamic_shapes=({1: length}, None), strict=True),
        "fork": torch.export.export(Fork(model), (torch.zeros(max(batches), dtype=torch.int64),), strict=True),
    }
    for batch in batches:
        # not the same tensor twice: torch.export would make one input of the two
        args = (torch.zeros(batch, 1, dtype=torch.int64), torch.zeros(batch, 1, dtype=torch.int64))
        programs[f"decode_b{batch}"] = torch.export.export(Decode(model, batch), args, strict=True)
    linears = XnnpackPartitioner(configs=[LinearConfig])
    edge = to_edge_transform_and_lower(
        programs,
        partitioner={name: [linears] if name == "decode_b1" else [] for name in programs},
        constant_methods={CONTEXT_METHOD: ROOM},
        compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
    )
    config = ExecutorchBackendConfig(memory_planning_pass=MemoryPlanningPass(share_mutable_buffers=True))
    path.write_bytes(edge.to_executorch(config).buffer)


def make_bundle(folder: Path) -> None:
    """The whole bundle."""
    folder.mkdir()
    write_program(folder / "model.pte")
    (folder / "model.pi2").write_bytes(bytes(range(256)) * 16)
    tokenizer = byte_tokenizer(TEXT)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    write_manifest(folder)


def shared_bundle(factory: pytest.TempPathFactory) -> Path:
    """The bundle, made once for all workers of a test run; to read. Change a copy."""
    return shared_folder(factory, "tiny-bundle", make_bundle)


def write_manifest(folder: Path, batches: tuple[int, ...] = (1, 2, 4)) -> Manifest:
    """manifest.json of what is in ``folder``."""
    from executorch.version import __version__ as executorch_version

    files = describe_files(folder)
    manifest = Manifest(
        kind="decoder",
        target="xnnpack",
        made_by={"torch_pi2": "0.1.0", "torch": torch.__version__, "executorch": executorch_version},
        files=files,
        model=Model("TinyDecoder", "tiny", "ab" * 32, "float32", "float32", 1, WIDTH, VOCAB),
        methods={
            "forward": MethodEntry("forward", 1, PROMPT),
            **{f"decode_b{batch}": MethodEntry("decode", batch, 1, (batch,)) for batch in batches},
            "fork": MethodEntry("fork", LANES, 1),
        },
        max_tokens=ROOM,
        lanes=LANES,
        pte_bytes=files["model.pte"].bytes,
        store_bytes=files["model.pi2"].bytes,
        ffn_bytes=files["model.pi2"].bytes // 2,
        fixed_bytes=1 << 20,
        token_bytes=64,
        eos=(EOS,),
        bos=EOS,
    )
    manifest.save(folder)
    return manifest
