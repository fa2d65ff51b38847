"""What a good guest does: importing changes nothing, layers stay apart, errors help, no machine leaks into files."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import torch_pi2
from torch_pi2 import errors

REPO = Path(__file__).resolve().parents[2]
PACKAGE = REPO / "torch_pi2"

#: Runs in a fresh interpreter. torch itself is a dependency; only what torch_pi2 adds to it counts.
_PROBE = """
import json, os, sys
import torch
events = []
WATCHED = ("socket.", "subprocess.", "os.system", "os.exec", "os.fork", "urllib.", "webbrowser.")
def hook(name, args):
    if name.startswith(WATCHED) or (name == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")):
        events.append(f"{name} {args!r}"[:200])
before = (dict(os.environ), torch.get_num_threads(), torch.get_num_interop_threads(), torch.get_default_dtype(),
          torch.is_grad_enabled(), list(sys.path), torch.initial_seed())
modules = set(sys.modules)
sys.addaudithook(hook)
import IMPORTED
watched = list(events)
after = (dict(os.environ), torch.get_num_threads(), torch.get_num_interop_threads(), torch.get_default_dtype(),
         torch.is_grad_enabled(), list(sys.path), torch.initial_seed())
print("PROBE" + json.dumps({"same": before == after, "events": watched, "modules": sorted(set(sys.modules) - modules)}))
"""

_HEAVY = ("transformers", "tokenizers", "executorch", "torchao", "scipy", "pandas", "matplotlib", "huggingface_hub")


def _probe(imported: str) -> tuple[dict, str, str]:
    code = _PROBE.replace("IMPORTED", imported)
    done = subprocess.run([sys.executable, "-B", "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    out, _, probe = done.stdout.rpartition("PROBE")
    return json.loads(probe), out, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("imported", ["torch_pi2", "torch_pi2.cli"])
def test_import_has_no_side_effects(imported: str) -> None:
    probe, out, err = _probe(imported)
    assert (out, err) == ("", "")
    assert probe["same"], "import changed the environment, threads, dtype, grad mode, path or seed"
    assert probe["events"] == [], "import wrote a file, opened a socket or started a process"
    heavy = [name for name in probe["modules"] if name.split(".")[0] in _HEAVY]
    assert heavy == []


@pytest.mark.slow
def test_public_names_are_functions_even_after_their_rooms_are_imported() -> None:
    """``export`` names both a function and a package; the function must win on ``torch_pi2``, whatever comes first."""
    code = (
        "import torch_pi2.export.api, torch_pi2.export.qnn, torch_pi2\n"
        "from torch_pi2.export import manifest\n"
        "assert all(callable(getattr(torch_pi2, name)) for name in torch_pi2.__all__ if name != '__version__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_torch_is_imported_with_the_first_name_that_needs_it() -> None:
    code = (
        "import sys, torch_pi2, torch_pi2.cli\n"
        "torch_pi2.cli.build_parser(), torch_pi2.Config, torch_pi2.Pi2Error, dir(torch_pi2)\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "torch_pi2.load\n"
        "assert 'torch' in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_names_for_type_checkers_are_those_of_the_package() -> None:
    about, *imports = ast.parse((PACKAGE / "__init__.pyi").read_text()).body
    assert isinstance(about, ast.Expr)
    # nothing else, and no __getattr__: or type checkers take every misspelt name
    assert all(isinstance(node, ast.ImportFrom) for node in imports)
    found = {alias.name: node.module for node in imports for alias in node.names if alias.asname == alias.name}
    assert found == torch_pi2._MODULE_OF
    assert sorted(found) == torch_pi2.__all__
    for name, module in found.items():
        assert getattr(torch_pi2, name) is getattr(importlib.import_module(module), name)
    with pytest.raises(AttributeError, match="module 'torch_pi2' has no attribute 'nothing'"):
        torch_pi2.nothing


def test_benchmarks_stay_outside_the_package() -> None:
    """Nothing of the wheel uses them."""
    for path in _sources(PACKAGE, ".py"):
        assert not re.search(r"^\s*(from|import) benchmarks\b", path.read_text(), re.M), path


def _sources(folder: Path, *suffixes: str) -> list[Path]:
    files = [p for p in sorted(folder.rglob("*")) if p.suffix in suffixes]
    assert files, f"nothing to check in {folder}"
    return files


#: Rooms of csrc that belong to the core.
CORE = ("base", "kernels", "io", "cache", "store", "attention", "ffn", "step", "engine", "include")


@pytest.mark.parametrize("room", CORE)
def test_the_core_includes_no_framework(room: str) -> None:
    framework = re.compile(
        r'^\s*#\s*include\s*[<"](torch|ATen|c10|caffe2|executorch|pybind11|Python\.h|nanobind)', re.M
    )
    for path in _sources(REPO / "csrc" / room, ".h", ".cc", ".cpp", ".inc"):
        found = framework.search(path.read_text())
        assert found is None, f"{path.relative_to(REPO)} includes {found and found.group(1)}"


def test_the_delegate_itself_includes_no_executorch() -> None:
    """So that its tests, the sanitizers and the fuzzer build without it."""
    bridges = {"backend.cc", "cached_attention.cc", "kernels.cc", "operators.h", "threads.h"}
    files = {p.name: p for p in (REPO / "csrc" / "bindings" / "executorch").iterdir()}
    assert bridges < set(files)
    for name in set(files) - bridges:
        assert not re.search(r"^#include <executorch/", files[name].read_text(), re.M), name


def test_every_room_of_the_core_is_checked() -> None:
    """A new folder in csrc is either framework-free (and listed above) or one of these."""
    rooms = {p.name for p in (REPO / "csrc").iterdir() if p.is_dir()}
    assert rooms == {*CORE, "bindings", "tests", "bench", "fuzz"}


def _calls(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


def test_the_library_does_not_print_or_set_threads() -> None:
    forbidden = {"print", "torch.set_num_threads", "torch.set_num_interop_threads", "torch.manual_seed", "os.putenv"}
    for path in _sources(PACKAGE, ".py"):
        if not path.is_relative_to(PACKAGE / "cli"):  # the command may do both
            text = path.read_text()
            assert not forbidden & set(_calls(ast.parse(text))), path
            assert "os.environ[" not in text, path


def _error_classes() -> list[type[errors.Pi2Error]]:
    found = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.Pi2Error)]
    assert len(found) > 8
    return found


@pytest.mark.parametrize("error", _error_classes())
def test_every_error_says_what_expected_found_and_fix(error: type[errors.Pi2Error]) -> None:
    raised = error("the size of x", expected="4", found="5", fix="Pass four.")
    assert (raised.what, raised.expected, raised.found, raised.fix) == ("the size of x", "4", "5", "Pass four.")
    assert str(raised) == "the size of x: expected 4, found 5. Pass four."
    assert error.__doc__
    for missing in ("expected", "found", "fix"):
        parts = {"expected": "4", "found": "5", "fix": "Pass four."}
        del parts[missing]
        with pytest.raises(TypeError):
            error("the size of x", **parts)


def _project_files() -> list[Path]:
    """Everything that belongs to the project, without asking git (which a user may not have)."""
    skipped = {".git", "build", "dist", "work", "demo-out", "__pycache__", "_lib"}

    def walk(folder: Path) -> Iterator[Path]:
        for path in sorted(folder.iterdir()):
            hidden_folder = path.is_dir() and path.name.startswith(".") and path.name != ".ci"
            if path.is_symlink() or hidden_folder or path.name in skipped or path.name.endswith(".egg-info"):
                continue
            if path.is_dir():
                yield from walk(path)
            else:
                yield path

    return list(walk(REPO))


def test_no_file_names_somebodys_machine() -> None:
    """Absolute paths below home, work and mount folders belong to one machine only."""
    machine = re.compile(r"(?<![\w.\-/}\])*])/(?:work|home|root|Users|mnt|workspace)/\w")
    offenders = []
    for path in _project_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # weights and images
        offenders += [f"{path.relative_to(REPO)}: {m.group()}..." for m in machine.finditer(text)]
    assert offenders == []
    assert machine.search('cd "' + "/ho" + 'me/me"')
    assert machine.search("at /ro" + "ot/x")


def test_what_other_libraries_tell_their_developers_is_not_shown_by_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers imports torchao, which logs what it could not load."""
    others = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in others]

    def read(*_: object) -> None:
        for logger in others:
            logger.warning("advice")
            logger.error("an error")
        raise KeyboardInterrupt

    monkeypatch.setattr("torch_pi2.checkpoint.save_load.read_model", read)
    (tmp_path / "pi2").mkdir()
    with pytest.raises(KeyboardInterrupt):
        torch_pi2.load(tmp_path)
    assert [record.message for record in caplog.records] == ["an error"] * 2
    assert [logger.level for logger in others] == levels
