"""What verbs that write a model say at their end: the verdict, measured or why not, kept in the folder and its card."""

from __future__ import annotations

import argparse
import contextlib
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_pi2.base.progress import phase
from torch_pi2.cli import common
from torch_pi2.errors import Pi2Error

if TYPE_CHECKING:
    from torch import nn

    from torch_pi2.types.verdict import Verdict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-verdict",
        action="store_true",
        help="do not measure dense against sparse at the end, which takes some seconds, or some steps of a large model",
    )


def step(verb: str, source: str | Path, settings: Mapping[str, Any]) -> str:
    """How a folder was made, without the paths of the machine. settings: fields of Config."""
    options = {"calibration_tokens": "tokens"}
    words = [f"--{options.get(name, name).replace('_', '-')} {value}" for name, value in settings.items()]
    return " ".join([f"torch-pi2 {verb}", _named(source), *words])


def _named(source: str | Path) -> str:
    """A folder's own name, or a name on the Hub."""
    return Path(source).resolve().name if Path(source).is_dir() else str(source)


def dense_of(args: argparse.Namespace, needed: int | None = None) -> tuple[nn.Module | None, dict[str, str]]:
    """The dense model ``args.model`` beside what is in memory already, or why it is not there.

    needed: its bytes, if they are known.
    """
    from torch_pi2.machine.process import free_bytes

    free = free_bytes()
    if needed is not None and free is not None and 1.2 * needed > free:
        return None, {"dense": f"it takes {common.size(needed)} beside this model, and {common.size(free)} are free"}
    try:
        return common.load_dense(args), {}
    except Pi2Error as error:
        return None, {"dense": f"it does not load: {error.found}"}


def of_folder(args: argparse.Namespace, verb: str, lossy: Sequence[str] = ()) -> None:
    """Judge the folder ``args.out`` that ``verb`` made of the folder ``args.source``.

    Where no number changed, what was found of the source holds, and is not measured again: it says so.
    """
    from dataclasses import replace

    from torch_pi2.eval.verdict import weight_bytes

    earlier, rounded = read(args.source), getattr(args, "weights", None) not in (None, "float")
    made = [*before(args.source), step(verb, args.source, {"weights": args.weights} if rounded else {})]
    if earlier is not None and not rounded:
        how = f"in memory, of {_named(args.source)}, before {verb}"
        speed = earlier.speed and replace(earlier.speed, how="; ".join(filter(None, (earlier.speed.how, how))))
        found = replace(earlier, made=tuple(made), sparse_bytes=weight_bytes(args.out), speed=speed)
    else:
        with judging(args.out):
            found = _of_folder(args, made, lossy)
    keep(args.out, found, args.source)


@contextlib.contextmanager
def judging(folder: Path) -> Iterator[None]:
    """Says that ``folder``, which is written, is measured from here on. Ctrl-C leaves it without a verdict."""
    phase("dense against sparse (--no-verdict leaves it out)")
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"{folder} is whole, but for the verdict") from None


def _of_folder(args: argparse.Namespace, made: Sequence[str], lossy: Sequence[str]) -> Verdict:
    import torch_pi2
    from torch_pi2.eval.verdict import judge, unmeasured, weight_bytes
    from torch_pi2.machine.process import free_bytes
    from torch_pi2.store.parts import Parts
    from torch_pi2.store.storefile import open_weights, weights_path

    needed, free, as_model = weight_bytes(args.out), free_bytes(), loading(args)
    sparse, why = None, ""
    if free is not None and 1.2 * needed > free:
        why = f"it takes {common.size(needed)} in memory, and {common.size(free)} are free"
    else:
        try:
            sparse = torch_pi2.load(args.out, trust_remote_code=args.trust_remote_code)
        except Pi2Error as error:  # what was written is good all the same: a model that only its own code can build
            why = f"it does not load without more: {error.found}"
    if sparse is None:
        with Parts(args.out / "pi2") as parts, open_weights(args.out / "pi2") as weights:
            about: dict[str, Any] = {"not_measured": {"speed": why, "loss": why}, "made": made, "lossy": lossy}
            return unmeasured(args.out, parts.plan(), weights.neuron_formats, **about)
    if weights_path(args.source / "pi2") is None:
        dense, missing = dense_of(as_model, weight_bytes(args.source))
    else:
        dense, missing = None, {"dense": "the folder that it was made of has quantised weights alone"}
    tokenizer = None
    with contextlib.suppress(Pi2Error):  # synthetic models have none
        tokenizer = common.load_tokenizer(as_model)
    about = {"tokenizer": tokenizer, "made": made, "not_measured": missing, "lossy": lossy}
    return judge(sparse, dense, args.out, **about, trust_remote_code=args.trust_remote_code)


def loading(args: argparse.Namespace) -> argparse.Namespace:
    """``args.source`` as the verbs have it that load a MODEL."""
    about = {"trust_remote_code": args.trust_remote_code, "allow_download": False}
    return argparse.Namespace(model=str(args.source), dtype="auto", **about)


def inner(folder: Path) -> Path:
    return folder / "pi2" if (folder / "pi2").is_dir() else folder


def read(folder: Path, model_hash: str | None = None) -> Verdict | None:
    """That of a folder, if it has one."""
    from torch_pi2.types.verdict import Verdict

    return Verdict.find(inner(folder), model_hash)


def before(folder: Path) -> Sequence[str]:
    """The steps that made ``folder``, as far as its verdict says them."""
    found = read(folder) if folder.is_dir() else None
    return () if found is None else found.made


def keep(folder: Path, verdict: Verdict, source: str | Path) -> None:
    """Write ``verdict`` and the card into ``folder``, which was made of ``source``."""
    from torch_pi2.checkpoint.card import write_card

    verdict.save(folder / "pi2")
    write_card(folder, verdict, source, f"torch-pi2 generate {folder.resolve().name} --prompt 'Once upon a time'")


def shown(data: dict[str, Any] | None) -> str:
    """A verdict as ``--json`` has it, as lines; nothing if there is none."""
    if data is None:
        return ""
    from torch_pi2.base.fields import from_json
    from torch_pi2.types.verdict import Verdict

    verdict = from_json(Verdict, {k: v for k, v in data.items() if k not in ("format", "version")}, "verdict")
    lines = (f"{name + ':':10}{value}" for name, value in verdict.lines().items())
    return "\n" + "\n".join(textwrap.fill(line, 80, subsequent_indent=10 * " ") for line in lines)
