"""Measures a :class:`torch_pi2.types.verdict.Verdict`, dense against sparse, in seconds."""

import datetime
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_pi2.decode.decoder import Decoder
from torch_pi2.errors import UnsupportedModelError
from torch_pi2.eval.loss import paired_loss
from torch_pi2.eval.timing import time_decode
from torch_pi2.formats import FLOAT, FLOATS
from torch_pi2.machine import process
from torch_pi2.profiling.text import stdlib_text
from torch_pi2.rewrite.state import get_state
from torch_pi2.store.folder import PI2_FOLDER
from torch_pi2.store.synthetic import TokenStream
from torch_pi2.store.trust import trusted
from torch_pi2.types.plan import Plan, lossy_methods
from torch_pi2.types.verdict import Loss, Speed, Verdict

#: Tokens before the clock starts.
_PROMPT = 16
_ROUNDS, _MOST_TOKENS = 5, 32
#: Tokens to score, at most, and bytes of their text.
_SCORED, _TEXT_BYTES = 4096, 64_000


def judge(
    sparse: nn.Module,
    dense: nn.Module | None,
    folder: str | Path,
    *,
    tokenizer: Any = None,
    made: Sequence[str] = (),
    dense_bytes: int | None = None,
    not_measured: Mapping[str, str] | None = None,
    lossy: Sequence[str] = (),
    trust_remote_code: bool = False,
    seconds: float = 10.0,
) -> Verdict:
    """Measure an optimised model beside its dense form.

    Half of ``seconds`` goes to decoding (batch 1, alternating rounds, medians), half to the loss on held-out text (the
    standard library). A slow model takes longer, as steps and windows run at least a few times.

    Args:
        sparse: optimised, in memory or over a store. dense: the model that it was made from; None: not available.
        folder: of ``sparse``. tokenizer: None: no loss is measured. made: commands that made the folder.
        dense_bytes: None: those of ``dense``. not_measured: reasons, by what is not measured.
        lossy: in addition to methods of the plan and formats of weights.

    Raises:
        ConfigError: ``sparse`` is not optimised. NonFiniteError: a loss is NaN or infinite.
    """
    folder, why = Path(folder), dict(not_measured or {})
    parts = get_state(sparse)
    synthetic = bool(getattr(getattr(sparse, "config", None), "torch_pi2_synthetic", None))
    if dense is None:
        why.setdefault("dense", "the dense weights are not here")
    if dense is None or tokenizer is None or synthetic:
        no_text = why["dense"] if dense is None else "no tokenizer is there that loads"
        why.setdefault("loss", "the weights are random" if synthetic else no_text)
    _, draw = text_or_random(sparse, folder, 0, trust_remote_code)
    speed = _speed(sparse, dense, draw(_PROMPT), seconds / 2)
    loss = None if dense is None or "loss" in why else _loss(sparse, dense, tokenizer, seconds / 2)
    if dense_bytes is None and dense is not None:
        dense_bytes = bytes_of(dense)
    lossy = [*lossy, *("sparse inputs" for _ in parts.inputs[:1])]
    verdict = unmeasured(folder, parts.plan, parts.weights, made=made, lossy=lossy, dense_bytes=dense_bytes)
    return replace(verdict, speed=speed, loss=loss, not_measured=why)


def unmeasured(
    folder: str | Path,
    plan: Plan,
    weights: str,
    *,
    made: Sequence[str] = (),
    lossy: Sequence[str] = (),
    dense_bytes: int | None = None,
    not_measured: Mapping[str, str] | None = None,
) -> Verdict:
    """The verdict on ``folder`` without running it. Arguments as of :func:`judge`; ``weights``: their format."""
    about, threads = process.describe(), torch.get_num_threads()
    methods = [f"{count} of {len(plan.layers)} layers {method}" for method, count in lossy_methods(plan).items()]
    rounded = [] if weights in (FLOAT, *FLOATS) else [f"{weights} weights"]
    machine = about["machine"]
    on = f"{threads} thread{'' if threads == 1 else 's'} on {machine['cores']} cores"
    return Verdict(
        model_hash=plan.model_hash,
        lossy=(*methods, *rounded, *lossy),
        made=tuple(made),
        sparse_bytes=weight_bytes(Path(folder)),
        dense_bytes=dense_bytes,
        speed=None,
        loss=None,
        not_measured=dict(not_measured or {}),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        machine={"cpu": str(machine["cpu"]), "threads": on, "kernels": f"kernels {str(machine['kernels']).strip()}"},
        versions=about["versions"],
    )


def bytes_of(model: nn.Module) -> int:
    """Bytes of parameters and buffers; shared ones count once."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def weight_bytes(folder: Path) -> int:
    """Bytes of the files in a model folder that hold weights or predictors."""
    names = ("weights.safetensors", "predictors.safetensors", "model.pi2")
    inner = [folder / PI2_FOLDER / name for name in names]
    return sum(path.stat().st_size for path in (*folder.glob("model*.safetensors"), *inner) if path.is_file())


def text_or_random(model: Any, folder: Path, seed: int, trust_remote_code: bool) -> tuple[str, Callable]:
    """Input for timing a model, as greedy text repeats itself: its description (held-out text if ``folder`` has a
    tokenizer for its vocabulary and weights are not random, else random ids), and a function of T that draws the next
    int64 ``[1, T]``.
    """
    vocabulary = model.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(seed)
    synthetic = bool(getattr(model.config, "torch_pi2_synthetic", None))
    ids = None if synthetic else _heldout_ids(folder, vocabulary, trust_remote_code)
    if ids is None:
        stream = TokenStream(vocabulary, topics=synthetic, generator=generator)
        kind = "of one topic for a while" if synthetic else "independent"
        return f"drawn at random, {kind}", lambda tokens: stream.draw(tokens)[None]
    at = torch.randint(len(ids), (1,), generator=generator)

    def draw(tokens: int) -> torch.Tensor:
        chosen = (at + torch.arange(tokens)) % len(ids)
        at.add_(tokens)
        return ids[chosen][None]

    return "source of Python's standard library, from a random place on", draw


def _heldout_ids(folder: Path, vocabulary: int, trust_remote_code: bool) -> torch.Tensor | None:
    """Ids ``[N]`` of held-out text; None if the folder has no tokenizer for the vocabulary."""
    from transformers import AutoTokenizer

    try:
        trust = trusted(folder, trust_remote_code)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust, local_files_only=True)
        ids = torch.tensor(tokenizer(stdlib_text("heldout", max_bytes=400_000), verbose=False)["input_ids"])
    except Exception:  # transformers and tokenizers raise many types for damaged files
        return None
    return ids if len(ids) and int(ids.max()) < vocabulary else None


def _speed(sparse: nn.Module, dense: nn.Module | None, prompt: torch.Tensor, seconds: float) -> Speed:
    models, steps = _as_generated([sparse] if dense is None else [dense, sparse], prompt)
    time_decode(models, prompt, new_tokens=2, warmup=0, rounds=1)  # page faults, allocations, recording of steps
    step_s = sum(timing.total_ms for timing in time_decode(models, prompt, new_tokens=1, warmup=0, rounds=3)) / 1e3
    tokens = max(1, min(_MOST_TOKENS, int(seconds / (_ROUNDS + 1) / step_s)))
    how = f"greedy decoding of {tokens} token{'s' if tokens > 1 else ''} after {_PROMPT}, batch 1, {steps}"
    *other, own = time_decode(models, prompt, new_tokens=tokens, rounds=_ROUNDS)
    if not other:
        return Speed(1e3 / own.total_ms, how=how)
    ratios = [one / two for one, two in zip(other[0].rounds, own.rounds, strict=True)]
    ratio = other[0].total_ms / own.total_ms
    return Speed(1e3 / own.total_ms, 1e3 / other[0].total_ms, ratio, min(ratios), max(ratios), how)


def _as_generated(models: Sequence[nn.Module], prompt: torch.Tensor) -> tuple[Sequence[nn.Module | Decoder], str]:
    """Decoders of all models, or the models themselves if one is not supported; and the kind of steps, in words."""
    try:
        about: dict[str, Any] = {"max_tokens": _PROMPT + _MOST_TOKENS, "compiled": False}
        # the dense model's own code is recorded too, where the sparse one no longer runs it
        decoders = [Decoder(m, recorded=True if len(models) > 1 and m is models[0] else None, **about) for m in models]
        for decoder in decoders:
            decoder.prompt(prompt)
    except UnsupportedModelError:
        return models, "steps of transformers"
    return decoders, "steps recorded, of both" if len(models) > 1 else "steps recorded"


def _loss(sparse: nn.Module, dense: nn.Module, tokenizer: Any, seconds: float) -> Loss:
    text, until = stdlib_text("heldout", max_bytes=_TEXT_BYTES), time.monotonic() + seconds
    found = paired_loss([dense, sparse], tokenizer, text, max_tokens=_SCORED, until=lambda: time.monotonic() > until)
    (dense_nats, sparse_nats), tokens = found
    change = sparse_nats / dense_nats - 1 if dense_nats > 0 else math.inf
    return Loss(min(change, 1e6), tokens, "held-out text (source of Python's standard library)")
