"""Imports of GGUF files that ``load`` keeps: one for each state of a file, by one process, made anew if damaged."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers.tokenization_utils_base import generate_merges

import torch_pi2
from torch_pi2.base.files import locked
from torch_pi2.checkpoint.gguf import importing
from torch_pi2.checkpoint.gguf.importing import cached_import
from torch_pi2.checkpoint.gguf.tokenizer import _implied_merges, _with_merges
from torch_pi2.errors import ArtifactError

GOLDEN = Path(__file__).parents[1] / "data" / "gguf" / "tiny-llama.q4_k_m.gguf"
KEEP = "from torch_pi2.checkpoint.gguf.importing import cached_import; from pathlib import Path; import sys\n"
KEEP += "print(cached_import(Path(sys.argv[1]), packed=False))"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "torch_pi2" / "gguf"


def names(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir())


@pytest.mark.slow
def test_the_second_waits_for_the_first(cache: Path) -> None:
    folder = cached_import(GOLDEN, packed=False)
    made = folder.rename(cache.parent / "made")
    with locked(folder.with_name(f"{folder.name}-import"), 0.0):
        second = subprocess.Popen(
            [sys.executable, "-c", KEEP, str(GOLDEN)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert second.stderr is not None
        said = next((line for line in second.stderr if "another process imports" in line), None)
        assert said is not None
        assert f"{GOLDEN}; this one waits for it" in said
        assert second.poll() is None
        made.rename(folder)
        before = (folder / "config.json").stat().st_ino
    out, _ = second.communicate(timeout=120)
    assert (second.returncode, out.strip()) == (0, str(folder))
    assert (folder / "config.json").stat().st_ino == before
    assert names(cache) == [folder.name]


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_what_a_killed_one_leaves(cache: Path, packed: bool) -> None:
    kill = "import os, signal, torch_pi2.checkpoint.gguf.importing as at\n"
    kill += "at.write_imported = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)\n"
    code = kill + KEEP.replace("packed=False", f"packed={packed}")
    killed = subprocess.run([sys.executable, "-c", code, str(GOLDEN)], capture_output=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert any(name.endswith(".partial") for name in names(cache))
    folder = cached_import(GOLDEN, packed=packed)
    assert names(cache) == [folder.name]
    torch_pi2.load(folder)


def test_a_file_that_has_not_changed_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.gguf"
    shutil.copy(GOLDEN, path)
    first = cached_import(path, packed=False)
    monkeypatch.setattr(importing, "GgufModel", None)
    assert cached_import(path, packed=False) == first
    (tmp_path / "link.gguf").symlink_to(path)
    assert cached_import(tmp_path / "link.gguf", packed=False) == first
    with pytest.raises(TypeError):
        cached_import(path, packed=True)
    os.utime(path, ns=(1, path.stat().st_mtime_ns))  # its inode has another time of change
    with pytest.raises(TypeError):
        cached_import(path, packed=False)


@pytest.mark.parametrize(
    ("words", "short"),
    [(['a"', "\\", "],[", '"merges":[', "\n", "你"], True), (["a b", "c"], False), (["#version", "c"], False)],
)
def test_merges_are_written_short_where_they_are_read_as_they_are(words: list[str], short: bool) -> None:
    pairs = [(left, right) for left in words for right in words]
    both = [left + right for left, right in pairs]
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys([*words, *both]))}
    tokenizer = Tokenizer(BPE(vocabulary, pairs))
    text = _with_merges(Tokenizer(BPE(vocabulary, [])), pairs)
    assert (json.loads(text)["model"]["merges"] == [f"{left} {right}" for left, right in pairs]) == short
    assert Tokenizer.from_str(text).to_str() == tokenizer.to_str()


@pytest.mark.parametrize("by_score", [True, False])
def test_merges_of_a_vocabulary_are_those_that_transformers_finds(by_score: bool) -> None:
    rng = random.Random(3)
    tokens = list(dict.fromkeys("".join(rng.choices("abc", k=rng.randint(1, 5))) for _ in range(200)))
    ids, scores = {token: index for index, token in enumerate(tokens)}, [rng.randrange(9) for _ in tokens]
    given = dict(zip(tokens, scores)) if by_score else {token: -index for token, index in ids.items()}
    shuffled = dict(sorted(ids.items()))
    assert _implied_merges(shuffled, scores if by_score else None) == generate_merges(ids, given)


def test_an_import_takes_the_place_of_an_earlier_versions(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One folder for a file and one for its store, of the current version."""
    old = [cached_import(GOLDEN, packed=packed) for packed in (False, True)]
    assert names(cache) == sorted(folder.name for folder in old)
    monkeypatch.setattr(importing, "_REVISION", importing._REVISION + 1)
    new = cached_import(GOLDEN, packed=False)
    assert names(cache) == [new.name]
    assert new not in old


def test_another_file_of_the_same_size_and_time(tmp_path: Path) -> None:
    """As ``cp -p`` puts it in the place of the first: a matrix differs, far behind the beginning."""
    path = tmp_path / "a.gguf"
    shutil.copy(GOLDEN, path)
    first, about = cached_import(path, packed=False), path.stat()
    assert cached_import(path, packed=False) == first
    tensor = next(one for one in gguf.GGUFReader(path).tensors if one.name == "blk.0.ffn_up.weight")
    with path.open("r+b") as file:
        file.seek(int(tensor.data_offset) + 8)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x11]))
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    second = cached_import(path, packed=False)
    assert second != first
    name = "model.layers.0.mlp.up_proj"
    rows = [torch_pi2.load(folder).get_submodule(name).dequantized() for folder in (first, second)]
    assert not torch.equal(*rows)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["weights", "plan", "config", "all"])
def test_a_damaged_import_is_made_again(cache: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    folder = cached_import(GOLDEN, packed=False)
    files = {"weights": "pi2/weights.safetensors", "plan": "pi2/plan.json", "config": "config.json"}
    if damage == "all":
        shutil.rmtree(folder / "pi2")
        (folder / "pi2").mkdir()
    else:
        os.truncate(folder / files[damage], (folder / files[damage]).stat().st_size // 2)
    caplog.set_level(logging.WARNING, "torch_pi2")
    torch_pi2.load(GOLDEN)
    assert f"{folder} is imported again: " in caplog.text
    caplog.clear()
    torch_pi2.load(GOLDEN)
    assert not caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["n" * 250, "ü" * 125, "a b\n$(c)"])
def test_names_of_files(tmp_path: Path, cache: Path, name: str) -> None:
    path = tmp_path / f"{name}.gguf"
    path.symlink_to(GOLDEN)
    folder = cached_import(path, packed=True)
    assert len(os.fsencode(folder.name)) < 130
    assert not set(folder.name) & set(" \n$()")
    assert names(cache) == [folder.name]


def test_a_cache_that_cannot_be_written(cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file")
    with pytest.raises(ArtifactError, match=r"writing .*tiny-llama.q4_k_m-[\w.]+: expected a folder that can be"):
        cached_import(GOLDEN, packed=False)
