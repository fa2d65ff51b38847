"""Tasks of lm-eval, EleutherAI's evaluation harness, on a loaded model; nothing is downloaded."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from torch_pi2.base.fields import checked
from torch_pi2.base.modules import evaluating
from torch_pi2.base.package import needed
from torch_pi2.errors import ConfigError, UnsupportedModelError
from torch_pi2.layers.prompt import sparse_only
from torch_pi2.rewrite.state import leaves_out


@checked
def harness(
    model: nn.Module, tokenizer: Any, tasks: Sequence[str], *, limit: int | None = None, batch_size: int = 8
) -> dict[str, dict[str, float]]:
    """Metrics of lm-eval (``acc``, ``acc_stderr``, ...) by task.

    Prompts are computed sparsely, like single tokens, so that the effect of a predictor shows.

    Args:
        model: of transformers, optimised or not.
        tasks: names in lm-eval, YAML files, or folders of these; data in files or in the cache of ``datasets``.
        limit: examples of each task, from the first one (None: all). batch_size: examples at once.

    Raises:
        LibraryMissingError: lm-eval is not installed. UnsupportedModelError: not a model of transformers.
        ConfigError: an unknown or broken task, or one without local data; or a ``model`` with ``OffloadConfig.lossy``,
            which only affects decoding, so that no task would show it.
    """
    if leaves_out(model):
        found = "OffloadConfig.miss_margin or drop_experts, which only apply to decoding"
        expected, fix = "a model that computes prompts as it decodes", "Use bits_per_byte, one token at a time."
        raise ConfigError("lm-eval", expected=expected, found=found, fix=fix)
    with needed("lm_eval", "eval"):
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        expected, fix = "a model of transformers", "Use bits_per_byte."
        raise UnsupportedModelError("lm-eval", expected=expected, found=f"a {type(model).__name__}", fix=fix)
    with _offline(), evaluating(model), sparse_only():
        lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
        # None: leaves the caller's generators alone
        seeds: Any = dict.fromkeys(("random_seed", "numpy_random_seed", "torch_random_seed"))
        found = simple_evaluate(lm, tasks=_loaded(tasks), limit=limit, **seeds)
    metrics: dict[str, dict[str, float]] = {}
    for task, figures in found["results"].items():
        of_task = metrics.setdefault(task, {})
        for key, value in figures.items():  # "acc,none": the metric, and its filter
            name, comma, filtered = key.partition(",")
            if comma and isinstance(value, int | float):
                of_task[name if filtered == "none" else f"{name} ({filtered})"] = float(value)
    return metrics


def _loaded(tasks: Sequence[str]) -> list[Any]:
    from lm_eval.tasks import TaskManager

    loaded: list[Any] = []
    for task in tasks:
        try:
            folder = Path(task).is_dir()
            manager = TaskManager(include_path=task if folder else None, include_defaults=not Path(task).exists())
            found = manager.load(manager.all_subtasks if folder else [task])["tasks"]
            if not found:
                raise ValueError("no task in it")
        except Exception as error:  # lm-eval, datasets and the Hub raise many types
            expected = "a name that it knows, or a YAML file, with data in files or in the cache of datasets"
            said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            fix = "Nothing is downloaded here: run it once with lm-eval's own command, or correct its file."
            raise ConfigError(f"lm-eval's task {task}", expected=expected, found=said, fix=fix) from error
        loaded += found.values()
    return loaded


@contextmanager
def _offline() -> Iterator[None]:
    import datasets.config
    import huggingface_hub.constants

    modules: list[Any] = [datasets.config, huggingface_hub.constants]
    before = [module.HF_HUB_OFFLINE for module in modules]
    try:
        for module in modules:
            module.HF_HUB_OFFLINE = True
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            module.HF_HUB_OFFLINE = value
