"""What all verbs share: help with defaults, -v and -q, what others say, completion, tables, folders."""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_pi2 import Config, cli
from torch_pi2.base.package import __version__
from torch_pi2.cli import terminal
from torch_pi2.cli.common import Help, has_no_default

REPO = Path(__file__).resolve().parents[2]
TRAINED = REPO / "examples" / "models" / "drelu-stdlib-5m"

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*argv: object) -> tuple[int, str, str]:
        return cli.main([str(a) for a in argv]), *capsys.readouterr()

    return run


# --- help, versions, mistakes ---


def options() -> Iterator[tuple[str, argparse.Action, str]]:
    """Every option of every verb, and its help as it is shown."""
    parser = cli.build_parser()
    verbs = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    for name, verb in verbs.choices.items():
        for action in verb._actions:
            if action.option_strings and action.help is not argparse.SUPPRESS:
                yield name, action, Help(verb.prog)._expand_help(action) if action.help else ""


def test_help_says_what_every_option_is_for_and_its_default() -> None:
    settings = {f.name: f.default for f in fields(Config)}
    found = list(options())
    assert {verb for verb, _, _ in found} == set(cli.VERBS)
    silent = [f"{verb} {a.option_strings[-1]}" for verb, a, said in found if not said]
    of_config = {a.dest for verb, a, _ in found if verb == "optimize" and a.dest in settings}
    assert len(of_config) >= 9
    for verb, action, said in found:
        default = action.default
        if verb in ("profile", "fit", "plan", "optimize"):
            default = settings.get(action.dest, default)
        wanted = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
        if not has_no_default(default) and not ("default" in said and wanted.removesuffix(".0") in said):
            silent.append(f"{verb} {action.option_strings[-1]} {wanted}: {said}")
    assert silent == []


def test_help_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    (verbs,) = (a for a in cli.build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    for name, verb in verbs.choices.items():
        lines = verb.format_help().partition("\n\n")[2].splitlines()  # argparse wraps usage between options alone
        assert [line for line in lines if len(line) > 80 and not line.startswith("  torch-pi2 ")] == [], name


def test_defaults_are_added_once_and_as_they_are_typed() -> None:
    parser = cli.Parser(prog="p", formatter_class=Help)
    parser.add_argument("--share", default="30%", help="of it")
    parser.add_argument("--sizes", default=(1, 2), help="of them")
    parser.add_argument("--said", default=1, help="so many (default: one)")
    parser.add_argument("--flag", action="store_true", help="a flag")
    parser.add_argument("--none", help="a name")
    text = " ".join(parser.format_help().split())
    assert "of it (default: 30%)" in text
    assert "of them (default: 1,2)" in text
    assert text.count("default") == 3


def test_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    python = ".".join(map(str, sys.version_info[:3]))
    assert capsys.readouterr().out == f"torch-pi2 {__version__} (torch {torch.__version__}, Python {python})\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the following arguments are required: VERB"),
        (["profile"], "the following arguments are required"),
        (["synthetic", "o", "--seed", "x"], "invalid seed value: 'x'"),
        (["profile", "m", "--out", "o", "--threads", "0"], "expected 1 or more, found 0"),
        (["genrate", "m"], "invalid choice: 'genrate' (choose from"),
        (["generate", "m", "--prompt", "x", "--promtp", "x"], "arguments: --promtp x. See `torch-pi2 generate --help`"),
        (["doctor", "--zzzzzz"], "unrecognized arguments: --zzzzzz. See `torch-pi2 doctor --help`."),
        (["generate", "m", "--prompt", "x", "--dtype", "floot16"], "invalid choice: 'floot16'"),
    ],
)
def test_wrong_arguments(command: Command, argv: list[str], message: str) -> None:
    code, out, err = command(*argv)
    assert (code, out) == (2, "")
    assert message in err
    assert "usage: torch-pi2" in err


def test_values_and_shorter_names_are_no_unknown_options() -> None:
    parse = cli.build_parser().parse_args
    args = parse(["generate", "m", "--prompt", "--a b", "--max-n=3"])
    assert (args.prompt, args.max_new_tokens) == ("--a b", 3)
    assert parse(["inspect", "--", "--folder"]).folder == Path("--folder")


# --- what is said on standard error ---


def _chatty(_args: object) -> dict[str, Any]:
    for logger in ("torch_pi2", "transformers.generation", "torchao", "torch.utils._pytree"):
        for level in (logging.INFO, logging.WARNING, logging.ERROR):
            logging.getLogger(logger).log(level, "%s says %s", logger, logging.getLevelName(level))
    warnings.warn_explicit("advice", FutureWarning, "x.py", 1, module="torch.nn")
    return {"ok": True}


SHOWN = {
    (): (["torch_pi2 says WARNING"], ["torch_pi2 says INFO", "torchao says WARNING", "_pytree says WARNING", "advice"]),
    ("-v",): (["torch_pi2 says INFO", "torchao says WARNING", "_pytree says WARNING", "advice"], []),
    ("-q",): ([], ["torch_pi2 says WARNING", "torchao says W", "_pytree says W", "advice"]),
}


@pytest.mark.slow
def test_messages_by_level() -> None:
    """In a process of its own, because pytest has handlers."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import test_command_line as here, torch_pi2.cli.doctor as doctor\n"
        "from torch_pi2 import cli\n"
        "doctor.run, doctor.render = here._chatty, lambda result: 'done'\n"
        "for option in here.SHOWN:\n"
        "    assert cli.main(['doctor', *option]) == 0\n"
        "    print('-' * 9, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(Path(__file__).parent)], **_CAUGHT)
    assert (done.returncode, done.stdout) == (0, "done\n" * len(SHOWN)), done.stderr
    for (shown, hidden), err in zip(SHOWN.values(), done.stderr.split("-" * 9 + "\n")):
        assert all(text in err for text in [*shown, "torch_pi2 says ERROR", "torchao says ERROR"])
        assert not any(text in err for text in hidden)
        assert err.count("torch_pi2 says ERROR") == 1


_CAUGHT: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 300}


def test_loggers_and_filters_are_left_as_they_were(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_pi2.cli.doctor.run", _chatty)
    monkeypatch.setattr("torch_pi2.cli.doctor.render", lambda _result: "")
    names = ("torch_pi2", "torchao", "transformers", "torch")
    command("doctor")  # torch is imported, and sets its own loggers

    def state() -> list[Any]:
        loggers = [logging.getLogger(name) for name in names]
        return [(g.level, list(g.handlers)) for g in loggers] + list(warnings.filters)

    before = state()
    for option in ((), ("-q",), ("-v",)):
        command("doctor", *option)
    assert state() == before


def test_verbose_and_quiet_exclude_each_other(command: Command) -> None:
    assert "not allowed with argument" in command("doctor", "-v", "-q")[2]


# --- completion ---


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "torch-pi2"
    with path.open("w") as file, contextlib.redirect_stdout(file), pytest.raises(SystemExit):
        cli.main(["--print-completion", "bash"])
    return path


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("gen", ["generate"]),
        ("generate m --prompt-", ["--prompt-lookup"]),
        ("generate m --dtype bf", ["bfloat16"]),
        ("inspect fol", ["folder"]),
        ("eval m --text fil", ["file.json"]),
    ],
)
def test_bash_completes(script: Path, tmp_path: Path, typed: str, wanted: list[str]) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file.json").touch()
    words = ["torch-pi2", *typed.split(" ")]
    asked = (
        f"source {script}; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; "
        f"name=$(complete -p torch-pi2 | sed 's/.*-F \\([^ ]*\\).*/\\1/'); "
        f"$name torch-pi2 {words[-1]} {words[-2]}; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(["bash", "-c", asked], cwd=tmp_path, **_CAUGHT)
    assert [line.strip() for line in done.stdout.splitlines()] == wanted, done.stderr


# --- tables ---


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_tables_fit_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = terminal.table(("name", "n"), [("a", 1), ("bb", 22)])
    assert shown == "name   n\n----  --\na      1\nbb    22"
    header = ("layer", "form", *(f"column {i}" for i in range(12)), "recall")
    rows = [(f"model.layers.{n}.mlp", "relu(gate)", *(n * 1000 + i for i in range(12)), "91 %") for n in range(3)]
    assert max(map(len, terminal.table(header, rows).splitlines())) > 80
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout", Terminal())
    lines = terminal.table(header, rows).splitlines()
    assert max(map(len, lines)) <= 80
    words = " ".join(lines).split()
    assert all(word in words for row in rows for cell in row for word in str(cell).split())
    assert words.count("model.layers.1.mlp") == lines.count("") + 1 > 1


# --- folders that another verb is for ---

#: Kind of folder -> a file in it, and verbs that refuse it, by what they name instead.
KINDS = {
    "bundle": (
        "manifest.json",
        {"torch-pi2 run ": "generate chat profile fit optimize quantize pack plan export"},
    ),
    "store": (
        "pi2/model.pi2",
        {"torch-pi2 generate ": "run", "Name the float checkpoint": "profile fit optimize quantize sparsify"},
    ),
    "quantised": (
        "pi2/weights.safetensors",
        {"torch-pi2 generate ": "run", "Name the float checkpoint": "profile fit optimize quantize"},
    ),
    "optimised": ("pi2/plan.json", {"torch-pi2 generate ": "run"}),
    "checkpoint": ("config.json", {"torch-pi2 optimize ": "run"}),
    "statistics": ("stats.safetensors", {"torch-pi2 optimize MODEL --stats ": "run generate pack"}),
    "predictors": ("predictors.safetensors", {"--stats STATS --predictors ": "run generate eval"}),
    "plan": ("plan.json", {"torch-pi2 inspect ": "run generate export"}),
}
PAIRS = [
    (verb, kind, fix) for kind, (_, fixes) in KINDS.items() for fix, verbs in fixes.items() for verb in verbs.split()
]
#: Required arguments of verbs.
NEEDS = {
    "run": ["--ids", "1"],
    "generate": ["--prompt", "x"],
    **{key: ["--out", "o"] for key in ("profile", "optimize", "export")},
    "fit": ["--stats", "s", "--out", "o"],
    "sparsify": ["--out", "o", "--text", "t"],
    **{key: ["o"] for key in ("pack", "quantize")},
}


@pytest.mark.parametrize(("verb", "kind", "fix"), PAIRS)
def test_a_folder_for_another_verb(command: Command, tmp_path: Path, verb: str, kind: str, fix: str) -> None:
    mark = tmp_path / "given" / KINDS[kind][0]
    mark.parent.mkdir(parents=True)
    mark.touch()
    (tmp_path / "given" / "config.json").touch()  # beside it, as in most of ours
    if kind in ("statistics", "predictors", "plan"):
        (tmp_path / "given" / "config.json").unlink()
    code, out, err = command(verb, tmp_path / "given", *NEEDS.get(verb, []))
    assert (code, out) == (2, "")
    assert err.startswith(f"torch-pi2: torch-pi2 {verb} {tmp_path / 'given'}: expected a")
    assert fix in err
    assert fix.startswith("Name") or str(tmp_path / "given") in err.partition("Use: ")[2]
    assert "usage:" not in err


def test_commands_that_are_named_parse() -> None:
    """Every ``Use:`` is a command line of ours."""
    from torch_pi2.cli.folders import _KINDS

    parse = cli.build_parser().parse_args
    for _, command in _KINDS.values():
        ours = command.partition(" -m torch_pi2 ")[2] or command.removeprefix("torch-pi2 ")  # or within torchrun
        parse(ours.format(folder="f").replace("'...'", "x").split())
