"""Small dense models with tokenizers, and the settings with which tests train them in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_tokenizers import TEXT, byte_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

TEXTS = [TEXT] * 4
#: 40 steps of 128 tokens; a rate that only so small a model takes.
FEW: dict[str, Any] = {"steps": 40, "batch": 4, "window": 32, "learning_rate": 3e-3, "save_every": 20}


def dense_llama(folder: Path, **more: Any) -> Path:
    """A SwiGLU model of two layers at random, and its tokenizer, in ``folder``."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer(TEXT)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=0,
        eos_token_id=0,
        **more,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
