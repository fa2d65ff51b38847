"""The verdict that verbs print after writing a model, and keep in its folder and model card."""

import argparse
import contextlib
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_pi2.base.progress import phase
from torch_pi2.cli import common, models
from torch_pi2.errors import Pi2Error

if TYPE_CHECKING:
    from torch import nn

    from torch_pi2.types.verdict import Verdict

#: Phase shown while a model is measured; its folder is complete by then.
MEASURING = "dense against sparse (--no-verdict leaves it out)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    measured = "do not measure dense against sparse at the end, which takes seconds, or some steps of a large model"
    parser.add_argument("--no-verdict", action="store_true", help=measured)


def step(verb: str, source: str | Path, settings: Mapping[str, Any]) -> str:
    """The command that made a folder, without paths of the machine. ``settings``: fields of Config."""
    options = {"calibration_tokens": "tokens"}
    words = [f"{common.option_of(options.get(name, name))} {value}" for name, value in settings.items()]
    return " ".join([f"torch-pi2 {verb}", _name_of(source), *words])


def _name_of(source: str | Path) -> str:
    return Path(source).resolve().name if Path(source).is_dir() else str(source)


def dense_of(args: argparse.Namespace, needed: int) -> "tuple[nn.Module | None, dict[str, str]]":
    """The dense model ``args.model``, if ``needed`` bytes are free for it and it loads; else None and the reason."""
    if why := no_memory(needed):
        return None, {"dense": why}
    try:
        return models.load_dense(args), {}
    except Pi2Error as error:
        return None, {"dense": f"it does not load: {error.found}"}


def no_memory(needed: int) -> str:
    """Why ``needed`` bytes do not fit into free memory; empty if they do."""
    from torch_pi2.machine.process import free_bytes

    free = free_bytes()
    if free is None or 1.2 * needed <= free:
        return ""
    return f"it takes {common.size(needed)} beside what is in memory, and {common.size(free)} are free"


def of_folder(args: argparse.Namespace, verb: str, lossy: Sequence[str] = ()) -> None:
    """Judge the folder ``args.out`` that ``verb`` made from the folder ``args.source``; if no weight changed, its
    verdict is taken over, with a note, and nothing is measured.
    """
    from torch_pi2.eval.verdict import weight_bytes

    earlier, rounded = read(args.source), getattr(args, "weights", None) not in (None, "float")
    made = (*(earlier.made if earlier else ()), step(verb, args.source, {"weights": args.weights} if rounded else {}))
    if earlier is not None and not rounded:
        how = f"in memory, of {_name_of(args.source)}, before {verb}"
        speed = earlier.speed and replace(earlier.speed, how="; ".join(filter(None, (earlier.speed.how, how))))
        found = replace(earlier, made=made, sparse_bytes=weight_bytes(args.out), speed=speed)
    else:
        phase(MEASURING)
        found = _of_folder(args, made, lossy)
    found.save(args.out / "pi2")


def _of_folder(args: argparse.Namespace, made: Sequence[str], lossy: Sequence[str]) -> "Verdict":
    import torch_pi2
    from torch_pi2.eval.verdict import judge, unmeasured, weight_bytes
    from torch_pi2.store.parts import Parts
    from torch_pi2.store.storefile import open_weights, weights_path

    about: dict[str, Any] = {"made": made, "lossy": lossy}
    why = no_memory(weight_bytes(args.out))
    try:
        sparse = None if why else torch_pi2.load(args.out, trust_remote_code=args.trust_remote_code)
    except Pi2Error as error:  # the folder is good all the same: such a model needs its own code
        sparse, why = None, f"it does not load without more: {error.found}"
    if sparse is None:
        with Parts(args.out / "pi2") as parts, open_weights(args.out / "pi2") as weights:
            reasons = {"speed": why, "loss": why}
            return unmeasured(args.out, parts.plan(), weights.neuron_formats, **about, not_measured=reasons)
    as_model = loading(args)
    dense, missing = None, {"dense": "the folder that it was made of has quantised weights alone"}
    if weights_path(args.source / "pi2") is None:
        dense, missing = dense_of(as_model, weight_bytes(args.source))
    tokenizer = None
    with contextlib.suppress(Pi2Error):  # synthetic models have none
        tokenizer = models.load_tokenizer(as_model)
    about |= {"tokenizer": tokenizer, "not_measured": missing, "trust_remote_code": args.trust_remote_code}
    return judge(sparse, dense, args.out, **about)


def loading(args: argparse.Namespace) -> argparse.Namespace:
    """``args`` of a verb that loads ``args.source`` as its MODEL."""
    about = {"trust_remote_code": args.trust_remote_code, "allow_download": False}
    return argparse.Namespace(model=str(args.source), dtype="auto", **about)


def read(folder: Path, model_hash: str | None = None) -> "Verdict | None":
    from torch_pi2.types.verdict import Verdict

    return Verdict.find(folder / "pi2" if (folder / "pi2").is_dir() else folder, model_hash)


def as_json(folder: Path, model_hash: str | None = None) -> dict[str, Any] | None:
    found = read(folder, model_hash) if folder.is_dir() else None
    return None if found is None else found.to_json()


def shown(data: dict[str, Any] | None) -> str:
    """The lines of a verdict in JSON; empty if there is none."""
    if data is None:
        return ""
    from torch_pi2.base.fields import from_json
    from torch_pi2.types.verdict import Verdict

    verdict = from_json(Verdict, {k: v for k, v in data.items() if k not in ("format", "version")}, "verdict")
    lines = (f"{name + ':':10}{value}" for name, value in verdict.lines().items())
    return "\n" + "\n".join(textwrap.fill(line, 80, subsequent_indent=10 * " ") for line in lines)
