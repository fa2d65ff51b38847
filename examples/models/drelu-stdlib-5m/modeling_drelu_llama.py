"""A Llama decoder whose FFNs are dReLU (TurboSparse, arXiv 2406.05955): relu(x Wg) * relu(x Wu).

Loaded by transformers with ``trust_remote_code=True``, as TurboSparse and Bamboo checkpoints are.
Only the FFN differs from ``LlamaForCausalLM``; it knows nothing of torch_pi2.
"""

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM


class DReLULlamaConfig(LlamaConfig):
    model_type = "drelu_llama"


class DReLUMLP(nn.Module):
    def __init__(self, config: DReLULlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        return self.down_proj(torch.relu(self.gate_proj(x_BTH)) * torch.relu(self.up_proj(x_BTH)))


class DReLULlamaForCausalLM(LlamaForCausalLM):
    config_class = DReLULlamaConfig

    def __init__(self, config: DReLULlamaConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = DReLUMLP(config)
        self.post_init()
