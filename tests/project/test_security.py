"""What SECURITY.md promises of the code itself; what it promises of files is in the tests of each kind of file."""

from __future__ import annotations

import argparse
import inspect
import re
from pathlib import Path

import torch_pi2
from torch_pi2.cli import build_parser

ROOT = Path(__file__).parents[2]
SECURITY = (ROOT / "SECURITY.md").read_text()


def test_readme_leads_to_it_and_it_to_what_exists() -> None:
    assert "(SECURITY.md)" in (ROOT / "README.md").read_text()
    named = re.findall(r"`((?:docs|cmake|export|tests)/[\w/.-]+)`|(docs/\w+\.md)", SECURITY)
    assert named
    assert all((ROOT / (a or b)).exists() for a, b in named)


def test_no_weights_are_unpickled() -> None:
    """But by the process that compiles for the NPU, of its parent's folder, and between processes of one model; of
    RWKV's own checkpoints tensors alone, which runs no code of the file.
    """
    unpickles = re.compile(r"\b(torch\.load|pickle|dill|marshal|shelve|yaml\.load|allow_pickle|all_gather_object)\b")
    folders = (ROOT / "torch_pi2", ROOT / "export")
    found = {
        str(path.relative_to(ROOT))
        for folder in folders
        for path in folder.rglob("*.py")
        if unpickles.search(path.read_text())
    }
    own = "torch_pi2/checkpoint/rwkv.py"
    assert found == {"torch_pi2/export/qnn/compile.py", "torch_pi2/distributed/group.py", own}
    loads = [len(re.findall(rf"torch\.load\({how}", (ROOT / own).read_text())) for how in ("", ".*weights_only=True")]
    assert loads == [1, 1]


def test_code_of_a_checkpoint_is_never_run_by_default() -> None:
    public = {name: getattr(torch_pi2, name) for name in torch_pi2.__all__}
    functions = {name: f for name, f in public.items() if inspect.isfunction(f)}
    asked = {n for n, f in functions.items() if "trust_remote_code" in inspect.signature(f).parameters}
    assert "load" in asked
    for name in asked:
        assert inspect.signature(functions[name]).parameters["trust_remote_code"].default is False


def test_no_command_runs_it_by_default() -> None:
    (verbs,) = (a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    flags = [a for verb in verbs.choices.values() for a in walk(verb) if "--trust-remote-code" in a.option_strings]
    assert flags
    assert all(a.default is False for a in flags)


def walk(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Its actions, and those of the verbs below it."""
    below = [p for a in parser._actions if isinstance(a, argparse._SubParsersAction) for p in a.choices.values()]
    return [*parser._actions, *(a for p in below for a in walk(p))]
