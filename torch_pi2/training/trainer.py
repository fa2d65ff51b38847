"""Hugging Face's Trainer with a penalty that makes zeros, and a controller of its weight.

The controller replaces ProSparse's manual schedule (arXiv 2402.13516): every ten steps the weight grows if fewer values
are zero than aimed at, and shrinks if more are. The aim rises to the target over the first half of the steps, so that
the model has time to adapt.
"""

import json
import math
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from torch_pi2.base.fields import argument
from torch_pi2.base.files import writing
from torch_pi2.base.package import needed
from torch_pi2.base.progress import bar, phase
from torch_pi2.base.units import percent
from torch_pi2.errors import ConfigError
from torch_pi2.training.settings import STEER_EVERY, SparsifySettings
from torch_pi2.training.zeros import Measured, Zeros, measure, next_token_loss

#: The penalty's first contribution to the loss, in nats.
_FIRST_NATS = 0.1
#: Maximum change of the logarithm of the weight at a time; gain over the logarithm of the share of non-zeros.
_MOST, _GAIN = 0.25, 2.0
#: The weight of the penalty stays within this factor of its first value.
_RANGE = 1e4
#: Fraction of the steps over which the aim rises to the target, from half of it or the initial share of zeros.
_RISE = 0.5


@dataclass
class SparseLoss:
    """Trainer's loss: on the text, divergence from the dense model's predictions, and ``weight`` times the penalty.
    ``sums``: of these and of zeros by layer, since the last :meth:`means`.
    """

    zeros: Zeros
    settings: SparsifySettings
    teacher: Any
    weight: float
    sums: torch.Tensor | None = None
    passes: int = field(default=0)

    def __call__(self, outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        torch.clear_autocast_cache()  # else weights that were cast stay stale within the caller's context
        nats = next_token_loss(outputs.logits, labels)
        loss, divergence, share = nats, torch.zeros_like(nats), self.settings.distill
        if self.teacher is not None:
            with torch.no_grad():
                wanted_BTV = self.teacher(input_ids=labels, use_cache=False).logits
            found, wanted = (F.log_softmax(logits[:, :-1].float(), -1) for logits in (outputs.logits, wanted_BTV))
            divergence = F.kl_div(found, wanted, reduction="none", log_target=True).sum(-1).mean()
            loss = (1 - share) * nats + share * divergence
        penalty, shares_L = self.zeros.take()
        seen = torch.cat([torch.stack([nats, divergence, penalty]), shares_L]).detach()
        self.sums = seen if self.sums is None else self.sums + seen
        self.passes += 1
        return (loss + self.weight * penalty) / self.settings.accumulate

    def means(self, accelerator: Any) -> list[float]:
        """Means over all processes; resets the sums."""
        assert self.sums is not None
        found: list[float] = (accelerator.reduce(self.sums, "mean") / self.passes).tolist()
        self.sums, self.passes = None, 0
        return found


class Steering:
    """Callback of Trainer: steers the penalty (resumed from its log), measures held-out loss, shows progress."""

    def __init__(self, loss: SparseLoss, heldout_NT: torch.Tensor, zeros: float, progress: bool) -> None:
        self.loss, self.heldout_NT, self.progress = loss, heldout_NT, progress
        self.first_weight, target = loss.weight, loss.settings.target_sparsity
        self.first_aim = min(target, max(target / 2, zeros))
        self.trainer: Any = None
        self._bar: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        rows = [row for row in state.log_history if "weight_next" in row]
        if rows:
            self.loss.weight = rows[-1]["weight_next"]
        what = f"train from step {state.global_step}" if state.global_step else "train"
        shown = self.progress and state.is_world_process_zero
        self._bar = bar(None, what, shown, total=state.max_steps, initial=state.global_step, unit="step")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._bar.update(1)
        if state.global_step == state.max_steps:  # Trainer would resume such a checkpoint with one step more
            control.should_save = False

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._bar.close()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" not in logs:  # the summary at the end
            return
        row, zeros, accelerator = state.log_history[-1], self.loss.zeros, self.trainer.accelerator
        nats, divergence, penalty, *shares = self.loss.means(accelerator)
        row |= {"nats_per_token": nats, "penalty": penalty, "zeros": shares, "weight": self.loss.weight}
        if self.loss.teacher is not None:
            row["divergence"] = divergence
        self._steer(state.global_step / state.max_steps, sum(shares) / len(shares))
        row["weight_next"] = self.loss.weight
        if state.global_step % args.save_steps == 0 or state.global_step == state.max_steps:
            part = (args.process_index, args.world_size)
            found = measure(self.trainer.model, zeros, self.heldout_NT, part=part, reduce=accelerator.reduce)
            torch.clear_autocast_cache()
            row["heldout_nats_per_token"] = found.nats_per_token
            if self.progress and state.is_world_process_zero and self._bar.disable:
                progress = f"{percent(found.mean_zeros)} zeros, held-out loss {found.nats_per_token:.4f} nats per token"
                phase(f"step {state.global_step} of {state.max_steps}: {progress}")

    def _steer(self, done: float, zeros: float) -> None:
        """Change the weight of the penalty. ``done``: part of the steps; ``zeros``: their present share."""
        risen = (self.loss.settings.target_sparsity - self.first_aim) * min(1.0, done / _RISE)
        aim = self.first_aim + risen
        change = _GAIN * math.log(max(1.0 - zeros, 1e-9) / (1.0 - aim))
        weight = self.loss.weight * math.exp(max(-_MOST, min(_MOST, change)))
        self.loss.weight = min(self.first_weight * _RANGE, max(self.first_weight / _RANGE, weight))


def training_arguments(settings: SparsifySettings, folder: Path, steps: int) -> Any:
    """Trainer's arguments; made first, because they initialise the processes of ``accelerate launch``. Raises
    LibraryMissingError: no transformers or accelerate. ConfigError: the batch cannot be shared by the processes, or
    this machine cannot compute in bfloat16.
    """
    with needed("accelerate", "train", "an installed accelerate, which trains"):
        import accelerate  # noqa: F401 (transformers' own message has no version)
    with needed("transformers", "train", "an installed transformers, which trains"):
        from transformers import TrainingArguments
    save_every = settings.save_every or max(STEER_EVERY, steps // 10 // STEER_EVERY * STEER_EVERY)
    how: dict[str, Any] = {"output_dir": str(folder), "max_steps": steps, "bf16": settings.bf16}
    how["per_device_train_batch_size"] = settings.batch  # divided below by the number of processes
    how |= {"gradient_accumulation_steps": settings.accumulate, "learning_rate": settings.learning_rate}
    how |= {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}}
    how |= {"warmup_steps": max(1, steps // 20), "weight_decay": 0.1, "adam_beta2": 0.95, "max_grad_norm": 1.0}
    how |= {"use_cpu": not torch.accelerator.is_available(), "seed": settings.seed, "data_seed": settings.seed}
    how |= {"logging_steps": STEER_EVERY, "logging_nan_inf_filter": False, "disable_tqdm": True, "report_to": "none"}
    how |= {"save_steps": save_every, "save_total_limit": 1, "dataloader_drop_last": True}
    how |= {"ddp_find_unused_parameters": False, "average_tokens_across_devices": False}  # windows are of equal length
    try:
        arguments = TrainingArguments(**how)
    except ValueError as error:
        fix = "Pass bf16=False."
        expected = "a device that computes in bfloat16"
        raise ConfigError("sparsify(bf16=True)", expected=expected, found=str(error), fix=fix) from error
    shared = settings.accumulate * arguments.world_size
    if settings.batch % shared:
        expected = f"a multiple of {shared} ({arguments.world_size} processes, accumulate={settings.accumulate})"
        argument(settings.batch, "sparsify(batch=...)", "Change one of them.").wrong(expected)
    arguments.per_device_train_batch_size = settings.batch // shared
    arguments._n_gpu = min(1, arguments.n_gpu)  # one GPU for each process
    return arguments


class _Rows:
    """Windows as Trainer's dataset; whole batches, so that every pass has each window once."""

    def __init__(self, windows_NT: torch.Tensor, batch: int) -> None:
        self._windows = windows_NT[: len(windows_NT) // batch * batch]

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids_T = self._windows[index].long()
        return {"input_ids": ids_T, "labels": ids_T}


def train(
    student: Any,
    zeros: Zeros,
    train_NT: torch.Tensor,
    heldout_NT: torch.Tensor,
    settings: SparsifySettings,
    arguments: Any,
    *,
    teacher: Any = None,
    begins: Measured,
    progress: bool = False,
) -> list[dict[str, Any]]:
    """Train ``student`` in place, from its last checkpoint if there is one; returns the rows of the log. ``begins``:
    the student before training sets the first weight of the penalty and the first aim. Raises ArtifactError: a
    checkpoint cannot be written (the last complete one remains).
    """
    from transformers import PrinterCallback, Trainer, TrainerCallback

    class Callback(Steering, TrainerCallback):
        """Steering, and no-ops for Trainer's other events."""

    loss = SparseLoss(zeros, settings, teacher, _FIRST_NATS / begins.penalty)
    steering = Callback(loss, heldout_NT, begins.mean_zeros, progress)
    use_cache = student.config.use_cache
    how: dict[str, Any] = {"train_dataset": _Rows(train_NT, settings.batch), "callbacks": [steering]}
    trainer = Trainer(model=student, args=arguments, compute_loss_func=loss, **how)
    trainer.remove_callback(PrinterCallback)
    steering.trainer = trainer
    if teacher is not None:
        teacher.to(arguments.device)
    with arguments.main_process_first():
        checkpoint = _last_checkpoint(Path(arguments.output_dir))
    with writing(Path(arguments.output_dir)):
        trainer.train(resume_from_checkpoint=checkpoint)
    trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_fp32_wrapper=False)
    student.config.use_cache = use_cache
    return [row for row in trainer.state.log_history if "weight" in row]


def _last_checkpoint(folder: Path) -> str | None:
    """The last complete checkpoint (the state is written last). Removes incomplete ones."""
    found = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)
    for path in found:
        try:
            json.loads((path / "trainer_state.json").read_text())
            return str(path)
        except (OSError, ValueError):
            shutil.rmtree(path, ignore_errors=True)
    return None


@contextmanager
def alone() -> Iterator[None]:
    """Restores random generators, which Trainer seeds; hides transformers' bars. Raises LibraryMissingError."""
    with needed("transformers", "train"):
        from transformers.utils import logging
    python, arrays, bars = random.getstate(), np.random.get_state(), logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)
            if bars:
                logging.enable_progress_bar()
