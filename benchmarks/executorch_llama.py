"""ExecuTorch's own export of a Llama: 8da4w in groups of 32 on XNNPACK, of a model's sizes, with random weights.

It is upstream's script, ``executorch.examples.models.llama.export_llama`` of the installed wheel, with the options that
its page names for Llama 3.2: keys and values in the program, ``custom_sdpa``, XNNPACK for linear layers and all else
that it takes, the embedding in 4 bits. But for one thing: linear layers are quantised before it, one by one, by the
same ``torchao`` configuration that it would use (``Int8DynamicActivationIntxWeightConfig``), since it wants a whole
model in float32 else. Layers are dense and SwiGLU: it knows no ReLU in a Llama.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.peer import PeerError, ended
from torch_pi2.errors import ConfigError

GROUP = 32
#: Tokens of a prompt that are read at once.
PIECE = 512
#: Of configurations whose models are what it calls a Llama.
_TYPES = ("llama", "mistral")


def exported(config: Any, folder: Path, max_tokens: int, seed: int = 0) -> Path:
    """The program in ``folder``, made if it is not there: methods ``forward(ids [1, T], input_pos [1])`` and constants.

    Args:
        config: of transformers. max_tokens: that keys and values have room for.

    Raises:
        ConfigError: a model that it has no form for. PeerError: its script failed.
    """
    window = getattr(config, "sliding_window", None)
    if config.model_type not in _TYPES or (window or max_tokens) < max_tokens:
        raise ConfigError(
            "--peer executorch",
            expected=f"a model of type {' or '.join(_TYPES)} without a window below {max_tokens} tokens",
            found=config.model_type + (f", a window of {window}" if window else ""),
            fix="Leave it out.",
        )
    made = folder / f"executorch-llama-{_sizes(config)}-{max_tokens}.pte"
    if made.is_file():
        return made
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        work = Path(scratch)
        torch.save(dict(_weights(config, torch.Generator().manual_seed(seed))), work / "model.pth")
        (work / "params.json").write_text(json.dumps(_params(config)))
        command = [sys.executable, "-m", "executorch.examples.models.llama.export_llama", "--model", "llama3_2"]
        command += ["--checkpoint", "model.pth", "--params", "params.json", "--output_name", "model.pte"]
        command += ["-kv", "--use_sdpa_with_kv_cache", "-X", "--xnnpack-extended-ops", "-d", "fp32"]
        command += ["--embedding-quantize", f"4,{GROUP}"]
        # Programs take a token less than this.
        command += ["--max_seq_length", str(min(PIECE + 1, max_tokens)), "--max_context_length", str(max_tokens)]
        done = subprocess.run(command, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode or not (work / "model.pte").is_file():
            found = f"{ended(done.returncode)}: {(done.stdout.strip().splitlines() or ['(no words)'])[-1]}"
            fix = "Is there enough memory for it?"
            raise PeerError("ExecuTorch's export_llama", expected="a program", found=found, fix=fix)
        os.replace(work / "model.pte", made)
    return made


def _sizes(config: Any) -> str:
    return f"{config.hidden_size}-{config.intermediate_size}-{config.num_hidden_layers}-{config.vocab_size}"


def _params(config: Any) -> dict[str, Any]:
    """In the words of its ``ModelArgs``."""
    return {
        "dim": config.hidden_size,
        "hidden_dim": config.intermediate_size,
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "head_dim": _head_dim(config),
        "vocab_size": config.vocab_size,
        "norm_eps": config.rms_norm_eps,
        "use_hf_rope": True,
    }


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _weights(config: Any, drawn: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of its checkpoints. Each of its own numbers: programs keep equal ones once."""
    width, inner = config.hidden_size, config.intermediate_size
    q, kv = (n * _head_dim(config) for n in (config.num_attention_heads, config.num_key_value_heads))
    yield "tok_embeddings.weight", torch.randn(config.vocab_size, width, generator=drawn)
    for layer in range(config.num_hidden_layers):
        attention, ffn = f"layers.{layer}.attention", f"layers.{layer}.feed_forward"
        linears = {f"{attention}.wq": (q, width), f"{attention}.wk": (kv, width), f"{attention}.wv": (kv, width)}
        linears |= {f"{attention}.wo": (width, q), f"{ffn}.w1": (inner, width), f"{ffn}.w3": (inner, width)}
        for name, size in (linears | {f"{ffn}.w2": (width, inner)}).items():
            yield f"{name}.weight", _quantised(*size, drawn)
        for norm in ("attention_norm", "ffn_norm"):
            yield f"layers.{layer}.{norm}.weight", torch.ones(width)
    yield "norm.weight", torch.ones(width)
    yield "output.weight", _quantised(config.vocab_size, width, drawn)


def _quantised(rows: int, columns: int, drawn: torch.Generator) -> torch.Tensor:
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
    from torchao.quantization.granularity import PerGroup

    linear = nn.Linear(columns, rows, bias=False)
    linear.weight.data = torch.randn(rows, columns, generator=drawn) * columns**-0.5
    holder = nn.Sequential(linear)
    four_bits: Any = getattr(torch, "int4")  # noqa: B009  types of torch do not have it
    how = Int8DynamicActivationIntxWeightConfig(weight_dtype=four_bits, weight_granularity=PerGroup(GROUP))
    quantize_(holder, how)
    return linear.weight
