"""``torch_pi2.sparsify``: continued training turns most FFN activations of a dense checkpoint into exact zeros."""

import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import nn

from torch_pi2.base.fields import Field, argument, checked
from torch_pi2.base.files import check_not_current, entries, json_text, locked, replacing_folder, writing
from torch_pi2.base.modules import fresh_settings
from torch_pi2.base.progress import phase
from torch_pi2.base.tensorfile import adding_checks
from torch_pi2.base.units import percent
from torch_pi2.checkpoint.save_load import load_dense
from torch_pi2.decode.decoder import check_vocabulary
from torch_pi2.errors import CalibrationError, ConfigError, UnsupportedModelError
from torch_pi2.profiling.data import digest, opening_of
from torch_pi2.store.folder import check_separate
from torch_pi2.store.trust import tokenizer_of
from torch_pi2.training.settings import STEER_EVERY, ResumeInfo, SparsifySettings
from torch_pi2.training.student import Code, student_of
from torch_pi2.training.trainer import alone, train, training_arguments
from torch_pi2.training.zeros import Measured, Zeros, measure
from torch_pi2.types.plan import weights_hash

FORMAT, VERSION = "torch_pi2.sparsify", 1
#: In the folder that is written: settings, measurements, and the curves of training.
REPORT_FILE = "sparsify.json"
#: Share of the text that is held back if no held-out text is given; minimum number of windows.
_HELD_BACK = 0.02
_LEAST_HELD_BACK = 4


@dataclass(frozen=True)
class SparsifyReport:
    """The result of :func:`sparsify`; also ``sparsify.json`` of the folder.

    Attributes:
        tokens: trained on, with repetitions. text_tokens: in the text. heldout_tokens: measured on.
        before: the dense model. changed: the same weights with another activation. after: the result.
        curve: every ten steps ``step``, ``nats_per_token`` (on the training text), ``zeros`` (by layer), ``weight`` of
            the ``penalty``, and ``learning_rate``; at checkpoints also ``heldout_nats_per_token``.
        seconds: wall time of this call.
    """

    settings: SparsifySettings
    steps: int
    tokens: int
    text_tokens: int
    heldout_tokens: int
    before: Measured
    changed: Measured
    after: Measured
    curve: list[dict[str, Any]]
    seconds: float

    @property
    def loss_change(self) -> float:
        """Relative to the dense model: 0.01 is 1 %. Training may lower the loss."""
        return self.after.nats_per_token / self.before.nats_per_token - 1

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    def lines(self) -> dict[str, str]:
        """The report as text, for a terminal."""
        by_layer = ", ".join(percent(share) for share in self.after.zeros.values())
        passes = self.tokens / self.text_tokens
        return {
            "zeros": f"{percent(self.after.mean_zeros)} of the neurons' values (by layer: {by_layer})",
            "loss": f"{self.after.nats_per_token:.4f} nats per token on {self.heldout_tokens:,} held-out tokens; the "
            f"dense model before any of this training: {self.before.nats_per_token:.4f} ({self.loss_change:+.2%})",
            "training": f"{self.steps:,} steps, {self.tokens:,} tokens ({passes:.2f} passes over the text)",
            "recipe": _recipe(self.settings),
        }


def _recipe(settings: SparsifySettings) -> str:
    parts = [
        f"{settings.activation}, a penalty on the neurons' values steered to {percent(settings.target_sparsity)} zeros",
        f"learning rate {settings.learning_rate:g}",
        f"{percent(settings.distill)} of the loss from the dense model's predictions" if settings.distill else "",
        "bfloat16" if settings.bf16 else "float32",
    ]
    return ", ".join(filter(None, parts))


@checked
@fresh_settings()
@alone()
def sparsify(
    model: nn.Module | str | Path,
    out: str | Path,
    text: Sequence[str],
    *,
    heldout: Sequence[str] | None = None,
    tokenizer: Any = None,
    trust_remote_code: bool = False,
    progress: bool = False,
    **settings: Annotated[Any, SparsifySettings],
) -> SparsifyReport:
    """Train ``model`` on ``text`` until most values of its FFN neurons are exactly zero; writes the folder ``out``.

    The activation becomes ReLU, and Hugging Face's Trainer trains with a penalty on the input of ``down``, whose weight
    is steered until the share of zeros is the target. Lossy: the report and ``sparsify.json`` have the
    loss on held-out text before and after. ``out`` is an ordinary Hugging Face folder for :func:`torch_pi2.optimize`
    (with ``drelu`` it contains modelling code, which needs ``trust_remote_code``).

    Checkpoints go to ``OUT.training`` beside ``out``: the same call resumes after a kill. Under ``accelerate launch``
    all processes train one model, each on its share of every batch.

    Args:
        model: of transformers (it is not changed), or its folder.
        text: documents to train on. heldout: others to measure on (None: the last 2 % of ``text``).
        tokenizer: default: from the folder that the model was loaded from.
        settings: see :class:`torch_pi2.training.settings.SparsifySettings`.

    Raises:
        ConfigError, ArtifactError, LibraryMissingError. CalibrationError: too little text. UnsupportedModelError: the
            activation of its FFNs cannot be changed. StaleArtifactError: ``OUT.training`` is of another training.
            NonFiniteError: the loss is NaN or infinite.
    """
    started, chosen, out = time.perf_counter(), SparsifySettings(**settings), Path(out).resolve()
    _check_out(out)
    source = str(getattr(model, "name_or_path", "")) if isinstance(model, nn.Module) else str(model)
    check_separate("sparsify", source, out)
    dense: Any = model if isinstance(model, nn.Module) else load_dense(model, trust_remote_code=trust_remote_code)
    _check_model(dense)
    tokenizer = tokenizer_of(dense, tokenizer, "sparsify(text)")
    train_NT, heldout_NT = _windows(text, heldout, tokenizer, chosen)
    _check_model_takes(dense, train_NT, heldout_NT)
    steps = chosen.steps or len(train_NT) // chosen.batch
    if steps < STEER_EVERY:
        argument(steps, "sparsify(steps=...)", "Pass more steps, or more text.").wrong(
            f"at least {STEER_EVERY}: the penalty is steered every {STEER_EVERY} steps",
            f"{steps}{'' if chosen.steps else ', one pass over the text'}",
        )
    student, sites, code = student_of(dense, chosen.activation)

    folder = out.with_name(f"{out.name}.training")
    arguments = training_arguments(chosen, folder, steps)
    first = arguments.process_index == 0
    about = (chosen, weights_hash(student, sites), digest([train_NT, heldout_NT]))
    with ExitStack() as stack:
        if first:
            with writing(folder):
                folder.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(folder, 0.0))
        resume = ResumeInfo.load(folder)
        zeros = Zeros(student, sites)
        if resume is not None:
            resume.check(*about, folder)
        else:
            if progress and first:
                phase("measure the dense model on held-out text")
            resume = ResumeInfo(*about, *_measure_before(dense, student, zeros, heldout_NT, arguments))
            if first:
                resume.save(folder)
        place, training = next(dense.parameters()).device, dense.training
        try:
            teacher, given = dense.eval() if chosen.distill else None, (train_NT, heldout_NT, chosen, arguments)
            curve = train(student, zeros, *given, teacher=teacher, begins=resume.changed, progress=progress)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"the same command resumes from {folder}") from None
        finally:
            dense.to(place).train(training)
        student.to(next(dense.parameters()).dtype)
        after = _measured(student, zeros, heldout_NT, arguments)
        zeros.remove()
        seen = (steps * chosen.batch * chosen.window, train_NT.numel(), heldout_NT.numel())
        losses = (resume.before, resume.changed, after)
        report = SparsifyReport(chosen, steps, *seen, *losses, curve, time.perf_counter() - started)
        if first:
            _write(out, student.to("cpu"), tokenizer, code, report, source)
            shutil.rmtree(folder, ignore_errors=True)
    arguments.distributed_state.wait_for_everyone()
    return report


def _check_out(out: Path) -> None:
    """Raises ArtifactError: ``out`` is the current folder, or contains anything but an earlier result."""
    check_not_current(out)
    if out.is_file() or (out.is_dir() and entries(out) and not (out / REPORT_FILE).is_file()):
        Field(out, f"writing {out}", "Choose another folder.").wrong(
            f"a new folder, or one written by sparsify (it has {REPORT_FILE}), which is replaced",
            "a file" if out.is_file() else f"a folder with {entries(out)[0].name} in it",
        )


def _check_model(dense: Any) -> None:
    from transformers import PreTrainedModel

    if not isinstance(dense, PreTrainedModel) or not hasattr(dense.config, "vocab_size"):
        Field(dense, "sparsify(model)", "Pass AutoModelForCausalLM.from_pretrained(...).", UnsupportedModelError).wrong(
            "a causal language model of transformers, or its folder", f"a {type(dense).__name__}"
        )
    if getattr(dense, "quantization_method", None) is not None or not next(dense.parameters()).is_floating_point():
        Field(
            dense, "sparsify(model)", "Train the float checkpoint, and quantise the result.", UnsupportedModelError
        ).wrong("float weights, which can be trained", "quantised ones")


def _windows(
    text: Sequence[str], heldout: Sequence[str] | None, tokenizer: Any, settings: SparsifySettings
) -> tuple[torch.Tensor, torch.Tensor]:
    for name, texts in (("text", text), ("heldout", heldout or ())):
        if not all(isinstance(part, str) for part in texts):
            fix = "Read the files first."
            raise ConfigError(f"sparsify({name})", expected="a list of texts", found="other values", fix=fix)
    train_NT = windows_of(text, tokenizer, settings.window)
    if heldout is None:
        return held_back(train_NT, settings.batch)
    _check_enough(len(train_NT), settings.batch, settings.window)
    heldout_NT = windows_of(heldout, tokenizer, settings.window)
    _check_enough(len(heldout_NT), 1, settings.window, "held-out text")
    return train_NT, heldout_NT


def windows_of(texts: Sequence[str], tokenizer: Any, window: int) -> torch.Tensor:
    """``[N, window]`` int32: tokens of ``texts``, each with an end token; an incomplete window is dropped.

    Every window begins with the BOS token if the tokenizer puts one before texts.
    """
    end, opening = tokenizer.eos_token_id, opening_of(tokenizer)
    ids: list[int] = []
    for text in texts:
        ids += tokenizer(text, verbose=False)["input_ids"]
        if end is not None and (not ids or ids[-1] != end):
            ids.append(end)
    rows, at = list[list[int]](), 0
    while at < len(ids):
        before = [] if ids[at : at + len(opening)] == opening else opening
        rows.append(before + ids[at : at + max(1, window - len(before))])
        at += len(rows[-1]) - len(before)
    whole = [row for row in rows if len(row) == window]
    return torch.tensor(whole, dtype=torch.int32).view(len(whole), window)


def held_back(windows_NT: torch.Tensor, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows to train on, and held-out ones from the end of the text. Raises CalibrationError: too few."""
    held = max(_LEAST_HELD_BACK, round(_HELD_BACK * len(windows_NT)))
    _check_enough(len(windows_NT) - held, batch, windows_NT.shape[1])
    return windows_NT[:-held], windows_NT[-held:]


def _check_enough(windows: int, batch: int, window: int, what: str = "text to train on") -> None:
    if windows < batch:
        expected, found = f"at least {batch} windows of {window} tokens", f"{max(0, windows)}"
        Field(windows, what, "Pass more text, or a smaller batch or window.", CalibrationError).wrong(expected, found)


def _check_model_takes(model: Any, *windows: torch.Tensor) -> None:
    """Raises ConfigError: ``windows`` exceed the positions or the vocabulary of ``model``."""
    places, window = getattr(model.config.get_text_config(), "max_position_embeddings", None), windows[0].shape[1]
    if places and window > places:
        expected = f"at most {places}, the positions that the model has (max_position_embeddings)"
        argument(window, "sparsify(window=...)", "Pass a smaller window.").wrong(expected)
    highest = torch.stack([part.max() for part in windows]).max()
    check_vocabulary(model, highest[None], "sparsify(tokenizer=...)")


def _measure_before(
    dense: Any, student: Any, zeros: Zeros, heldout_NT: torch.Tensor, arguments: Any
) -> tuple[Measured, Measured]:
    place, of_dense = next(dense.parameters()).device, Zeros(dense, zeros.sites)
    try:
        before = _measured(dense, of_dense, heldout_NT, arguments)
    finally:
        of_dense.remove()
        dense.to(place)
    return before, _measured(student, zeros, heldout_NT, arguments)


def _measured(model: Any, zeros: Zeros, heldout_NT: torch.Tensor, arguments: Any) -> Measured:
    """:func:`measure` on the training device, by all processes together."""
    part = (arguments.process_index, arguments.world_size)
    model.to(arguments.device)

    def reduce(sums: torch.Tensor) -> torch.Tensor:
        if part[1] > 1:
            torch.distributed.all_reduce(sums)
        return sums

    return measure(model, zeros, heldout_NT, part=part, reduce=reduce)


def _write(out: Path, student: Any, tokenizer: Any, code: Code | None, report: SparsifyReport, source: str) -> None:
    with replacing_folder(out) as staging:
        with adding_checks(staging):
            student.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        if code is not None:
            (staging / code.file_name).write_text(code.text)
        elif getattr(student.config, "auto_map", None) and Path(source).is_dir():
            for path in Path(source).glob("*.py"):
                shutil.copyfile(path, staging / path.name)
        (staging / REPORT_FILE).write_text(json_text(FORMAT, VERSION, report.to_json()) + "\n")
