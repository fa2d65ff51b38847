"""Memory of a bundle without its neurons, as the manifest has it. That the runner keeps to it: test_runner.py."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from torch_pi2.export.partitioner import _most_alive


class Attention(nn.Module):
    def forward(self, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        scores = torch.bmm(query, keys.transpose(1, 2))  # [2, T, 32]; the transposed one lives, and once more packed
        return torch.bmm(torch.softmax(scores * 0.5, -1), keys)


def test_workspace_is_what_lives_at_once_at_the_largest_size() -> None:
    length = torch.export.Dim("length", min=1, max=100)
    program = torch.export.export(
        Attention(), (torch.zeros(2, 8, 16), torch.zeros(2, 32, 16)), dynamic_shapes=({1: length}, None)
    )
    scores, keys = 2 * 100 * 32 * 4, 2 * 32 * 16 * 4
    assert _most_alive(program.graph) == 2 * scores  # two of three at once; keys twice are less
    long = torch.export.export(Attention(), (torch.zeros(2, 2, 16), torch.zeros(2, 32, 16)))
    assert _most_alive(long.graph) == 2 * keys + 2 * 2 * 32 * 4


_EXPORT = """
import resource, sys, tempfile, torch, torch_pi2
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4)
model = LlamaForCausalLM(LlamaConfig(**sizes, hidden_act="relu", head_dim=64, max_position_embeddings=1 << 20)).eval()
with tempfile.TemporaryDirectory() as folder:
    torch_pi2.export(torch_pi2.optimize(model), folder + "/b", max_tokens=int(sys.argv[1]), batches=(1,), kv="float16")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)
"""


@pytest.mark.slow
@pytest.mark.long
def test_exporting_a_long_context_takes_its_cache_in_float32_once() -> None:
    """Checking fills keys and values of all layers in float32; nothing else is as large."""
    peaks = [
        int(subprocess.run([sys.executable, "-c", _EXPORT, str(n)], capture_output=True, text=True, check=True).stdout)
        for n in (256, 16384)
    ]
    cache = 6 * 2 * 16384 * 4 * 64 * 4
    assert peaks[1] - peaks[0] < 1.9 * cache  # and of one layer what its attention makes of them
