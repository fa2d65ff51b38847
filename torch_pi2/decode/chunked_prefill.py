"""Chunked prefill: whether chunks of a prompt are lossless, and whether steps can take sequences of several lengths."""

import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from torch_pi2.base.fields import argument
from torch_pi2.base.offloaded import OffloadedParameter
from torch_pi2.decode.attention import RECURRENT, adds_masks, has_sinks, uses_sdpa
from torch_pi2.decode.guards import is_known
from torch_pi2.errors import ConfigError
from torch_pi2.formats import GGML
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.gpu import HybridFFN, device_of
from torch_pi2.layers.linear import QuantLinear
from torch_pi2.layers.prompt import dense_on_gpu_from, has_tiles, prompt_from
from torch_pi2.ops.attention import KV_DTYPES
from torch_pi2.ops.constants import constants
from torch_pi2.ops.gpu.operators import products_from

#: Tokens of a lossless chunk, all sequences together: activations of more do not fit in the CPU's caches.
CHUNK_TOKENS = 256
#: Minimum tokens of each sequence in a chunk, as the head is computed once per chunk.
LEAST_TOKENS = 64
#: Names of a cache in modules' code, of every version of transformers; and what it looks attention up in.
_CACHES, _LOOKED_UP = {"cache", "past_key_values", "past_key_value", "layer_past"}, "ALL_ATTENTION_FUNCTIONS"
#: Features that our attention lacks: name in configurations -> value that means "none".
_OTHER_ATTENTION = {"attn_logit_softcapping": None, "qk_rope_head_dim": None, "alibi": False}


def lossless_chunk_tokens(model: nn.Module) -> int:
    """``CHUNK_TOKENS`` if the bits of a prompt do not depend on its chunks, else 0: read it whole.

    PyTorch's products and attention have other last bits for another number of rows, so only the head, which sees one
    token, may be one of them.
    """
    ours = [m for m in model.modules() if isinstance(m, (QuantLinear, SparseFFN))]
    if device_of(model).type != "cpu":
        return 0
    if not ours or not all(m.int8_activations for m in ours) or not has_tiles() or not uses_our_attention(model):
        return 0
    lookups = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    head = model.get_output_embeddings()  # type: ignore[operator]
    known = {id(p) for part in (*lookups, head) if part is not None for p in part.parameters()}
    known |= {id(b) for part in ours for b in part.buffers()}
    others = (t for t in (*model.parameters(), *model.buffers()) if t.dim() > 1 and id(t) not in known)
    return 0 if any(t.is_floating_point() and not isinstance(t, OffloadedParameter) for t in others) else CHUNK_TOKENS


def prompt_path_lengths(model: nn.Module) -> tuple[int, ...]:
    """Prompt lengths from which on our layers take another code path than for shorter ones, ascending: on the same
    path, keys and values of the same tokens have the same bits.
    """
    layers = [m for m in model.modules() if isinstance(m, SparseFFN)]
    lengths = {constants().gemm_tokens, *map(prompt_from, layers)} - {0}
    if device_of(model).type != "cpu":
        linears = [m for m in model.modules() if isinstance(m, QuantLinear) and m.weights not in GGML]
        on_gpu = [home.split.hot if isinstance(home.split, HybridFFN) else home for home in layers]
        lengths |= {dense_on_gpu_from(layer) for layer in on_gpu if layer is not None}
        lengths |= {products_from(m.weights, m.in_features, m.dtype.itemsize) for m in linears}
    return tuple(sorted(lengths))


def uses_our_attention(model: nn.Module) -> bool:
    """Whether :func:`~torch_pi2.decode.attention.packed_sdpa` computes all attention of a Hugging Face ``model``."""
    from transformers import PreTrainedModel

    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    sinks = has_sinks(model)
    return all(sinks or uses_sdpa(p.config) for p in parts) and _could_use_ours(parts)


def _could_use_ours(parts: Sequence[Any]) -> bool:
    """Whether ours computes attention of these parts of a model once they use ``sdpa``."""
    others = [getattr(p.config, k, none) not in (none, None) for p in parts for k, none in _OTHER_ATTENTION.items()]
    return all(p._supports_attention_backend for p in parts) and not any(others)


def check_kv(model: nn.Module, kv: str | None) -> None:
    """Raises ConfigError: ``model`` cannot have keys and values in this format (None: its own dtype)."""
    if kv is None:
        return
    argument(kv, "kv", fix := "Leave it out for keys and values in the model's dtype.").text(tuple(KV_DTYPES))
    ours = uses_our_attention(model) and not attends_itself(model)
    if device_of(model).type != "cpu" or not ours:
        found = f"it on {device_of(model)}" if ours else "soft caps, masks that are added, or attention of its own"
        expected = "a model on the CPU with transformers' sdpa, which ours replaces"
        kinds = getattr(getattr(model, "config", None), "layer_types", None)
        parts = [part for part in model.modules() if hasattr(part, "_supports_attention_backend")]
        if kinds and RECURRENT.issuperset(kinds):
            found, fix = "recurrent states alone, without keys and values", "Leave it out."
        elif not ours and not attends_itself(model) and _could_use_ours(parts):
            found = f"attention {getattr(model.config, '_attn_implementation', None)!r}"
            fix = "Call model.set_attn_implementation('sdpa') first."
        raise ConfigError(f"kv of {type(model).__name__}", expected=expected, found=found, fix=fix)


def same_frequencies_up_to(model: nn.Module) -> int:
    """Maximum length of a call up to which rotary frequencies do not depend on it (longrope's do beyond)."""
    lengths = [sys.maxsize]
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        kinds = list(kinds.values()) if isinstance(kinds, Mapping) else [kinds]
        if any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds):
            config: Any = module.config
            parameters = getattr(config, "rope_parameters", None) or {}
            parts = (parameters, *(p for p in parameters.values() if isinstance(p, Mapping)))
            trained = [part.get("original_max_position_embeddings") for part in parts]
            named = [getattr(module, "original_max_seq_len", None), *trained]
            lengths += [length for length in named if isinstance(length, int)] or [0]
    return min(lengths)


def most_positions(model: nn.Module) -> int:
    """Maximum tokens of a sequence if positions are rows of a table, as in GPT-2 and OPT."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    trained = getattr(config, "max_position_embeddings", None)
    if not isinstance(trained, int):
        return sys.maxsize
    tables = [(name, len(table)) for name, table in model.named_buffers() if table.dim() == 2]
    for name, table in model.named_modules():
        if isinstance(table, nn.Embedding):  # OPT and BERT's family begin after the row of padding
            unused = getattr(table, "offset", 0 if table.padding_idx is None else table.padding_idx + 1)
            tables.append((name, table.num_embeddings - unused))
    rows = [rows for name, rows in tables if re.search("pos|wpe", name.rpartition(".")[2])]
    return min([n for n in rows if trained - 8 <= n <= trained + 8], default=sys.maxsize)  # others are of images


def takes_several_lengths(model: nn.Module, max_tokens: int) -> bool:
    """Whether ``model`` takes positions and masks, so that sequences of several lengths can be decoded together."""
    kinds = getattr(getattr(model, "config", None), "layer_types", None)
    if kinds and RECURRENT.issuperset(kinds):  # no positions
        return not attends_itself(model)
    takes = inspect.signature(model.forward).parameters
    named = "position_ids" in takes or any(p.kind is p.VAR_KEYWORD for p in takes.values())
    config = getattr(model, "config", None)
    masked = uses_sdpa(config) or (adds_masks(config) and "position_ids" in takes)  # without them: ALiBi
    return named and masked and max_tokens <= same_frequencies_up_to(model) and not attends_itself(model)


def attends_itself(model: nn.Module) -> bool:
    """Whether modules that use the cache are neither transformers' nor look attention up as those do: in a step, where
    a usual cache has no others, they may see the places of a static one that are not written yet.
    """
    inner = set[nn.Module]()
    for part in reversed(list(model.modules())):  # children first
        forward: Any = inspect.unwrap(part.forward)
        code = getattr(forward, "__code__", None)
        if code is None or _CACHES.isdisjoint((*code.co_varnames, *code.co_consts)):
            continue
        uses = "update" in code.co_names or inner.isdisjoint(part.modules())
        if uses and _LOOKED_UP not in code.co_names and not is_known(code, forward.__globals__):
            return True
        inner.add(part)
    return False
