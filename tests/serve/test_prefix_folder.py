"""``PrefixFolder``: blocks outlive a server, within their bytes, and one that is not what it should be is none."""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import torch_pi2
from torch_pi2.base.files import claimed
from torch_pi2.base.process import describe
from torch_pi2.base.tensorfile import Spec
from torch_pi2.errors import ArtifactError, ConfigError
from torch_pi2.layers.sharded import Share
from torch_pi2.serve.batch import Batch, Sequence, Taken
from torch_pi2.serve.identity import identity
from torch_pi2.serve.prefix import PrefixCache, _name
from torch_pi2.serve.prefix_file import Block, read_block, write_block
from torch_pi2.serve.prefix_folder import PrefixFolder
from torch_pi2.types.shard import Shard, ShardLayer

IDENTITY = "ab" * 32
SPECS = [Spec((2, 32, 8), torch.float32), Spec((2, 32, 8), torch.bfloat16)]
BYTES = 2 * 32 * 8 * 6
#: A page of header, and of data.
ON_DISK = 4096 + 4096


def block(seed: int) -> Block:
    chance = torch.Generator().manual_seed(seed)
    return [torch.randn(spec.shape, generator=chance).to(spec.dtype) for spec in SPECS]


def same(found: Block | None, seed: int) -> bool:
    return found is not None and all(map(torch.equal, found, block(seed)))


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def path_of(folder: Path, number: int) -> Path:
    return folder / f"{name(number).hex()}.prefix"


def opened(path: Path, budget: int = 1 << 20, waiting: int = 1 << 20, of: str = IDENTITY) -> PrefixFolder:
    return PrefixFolder(path, budget, of, SPECS, waiting_bytes=waiting)


def filled(path: Path, *numbers: int) -> None:
    folder = opened(path)
    for number in numbers:
        folder.write(name(number), block(number))
    folder.close()
    assert folder.counts.written == len(numbers)


def bytes_on_disk(path: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in path.iterdir())


def test_blocks_outlive_who_wrote_them(tmp_path: Path) -> None:
    path = tmp_path / "a" / "prefixes"
    filled(path, 1, 2)
    again = opened(path)
    assert same(again.read(name(1)), 1)
    assert same(again.read(name(2)), 2)
    assert again.read(name(3)) is None
    again.write(name(1), block(1))  # it is there
    again.close()
    again.write(name(4), block(4))  # nothing more is taken
    assert (again.counts.read, again.counts.written, again.counts.damaged) == (2, 0, 0)
    assert again.counts.bytes == bytes_on_disk(path) == 2 * ON_DISK
    assert sorted(os.listdir(path)) == sorted(path_of(path, number).name for number in (1, 2))
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o600}


def _changed(at: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)

    return change


def _instead(old: bytes, new: bytes) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        data = path.read_bytes()
        assert data.count(old) == 1
        path.write_bytes(data.replace(old, new))

    return change


def _foreign(path: Path) -> None:
    path.unlink()
    write_block(path, block(1), "cd" * 32, name(1).hex())


def _of_other_shapes(path: Path) -> None:
    path.unlink()
    write_block(path, [tensor[:1].clone() for tensor in block(1)], IDENTITY, name(1).hex())


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("nothing")


#: docs/FORMATS.md has this table: what is done to the file of block 1, and what is said.
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda path: path.write_bytes(b""), "found damage (a header of 0 bytes in a file of 0)"),
    "cut": (lambda path: os.truncate(path, 5000), "found damage (5000 bytes where the header says"),
    "cut in its header": (lambda path: os.truncate(path, 100), "found damage (a header of"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"0"), "bytes where the header says"),
    "text": (lambda path: path.write_text("x" * 9000), "found damage (a header of"),
    "first bit of a tensor": (_changed(4096), "checksum"),
    "last bit of the file": (_changed(-1), "checksum"),
    "checksum": (_instead(b'"check":"', b'"chalk":"'), "found None"),
    "dtype": (_instead(b'"dtype":"BF16"', b'"dtype":"F16" '), "expected 2 tensors"),
    "format": (_instead(b"torch_pi2.prefix", b"torch_pi2.suffix"), "expected format torch_pi2.prefix, found torch_pi2"),
    "version": (_instead(b'"version":"1"', b'"version":"2"'), "expected version 1, found 2"),
    "swapped": (lambda path: shutil.copy(path_of(path.parent, 2), path), f"expected block {name(1).hex()}"),
    "foreign": (_foreign, f"expected identity {IDENTITY}"),
    "other shapes": (_of_other_shapes, "expected 2 tensors, the first float32 [2, 32, 8], found others"),
    "a pipe": (_pipe, "found a pipe"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_what_is_damaged_is_deleted_and_computed_again(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    filled(tmp_path / "p", 1, 2)
    path, (damage, message) = path_of(tmp_path / "p", 1), DAMAGE[kind]
    damage(path)
    folder = opened(tmp_path / "p")
    with caplog.at_level(logging.WARNING, "torch_pi2"):
        assert folder.read(name(1)) is None
        assert folder.read(name(1)) is None  # said once
        assert same(folder.read(name(2)), 2)
    (said,) = caplog.messages
    assert "a block of a prefix is computed again" in said
    assert path.name in said
    assert message in said
    assert not path.exists()
    assert folder.counts.damaged == 1
    folder.write(name(1), block(1))
    folder.close()
    assert same(folder.read(name(1)), 1)


@pytest.mark.parametrize("kind", ["a folder", "a link to nothing", "a link to itself"])
def test_what_is_no_file_is_no_block(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    path = path_of(tmp_path, 1)
    path.mkdir() if kind == "a folder" else path.symlink_to("nothing" if kind == "a link to nothing" else path.name)
    folder = opened(tmp_path)
    with caplog.at_level(logging.WARNING, "torch_pi2"):
        assert folder.read(name(1)) is None
        assert folder.read(name(1)) is None
    assert len(caplog.messages) == (0 if kind == "a link to nothing" else 1)  # nothing is there
    folder.write(name(1), block(1))
    folder.write(name(2), block(2))
    folder.close()
    assert same(folder.read(name(2)), 2)


def test_after_one_that_is_damaged_others_are_looked_at_before_they_stay(tmp_path: Path) -> None:
    filled(tmp_path, 1, 2, 3)
    for number in (1, 2):
        _changed(5000)(path_of(tmp_path, number))
    folder = opened(tmp_path)
    assert folder.read(name(1)) is None  # who asked computes it and all after it
    for number in (1, 2, 3):
        folder.write(name(number), block(number))
    folder.close()
    assert folder.counts.written == 2
    again = opened(tmp_path)
    assert all(same(again.read(name(number)), number) for number in (1, 2, 3))
    again.close()


def test_what_is_unused_longest_goes_first(tmp_path: Path) -> None:
    budget = 5 * ON_DISK
    folder = opened(tmp_path, budget)
    for number in range(12):
        folder.write(name(number), block(number))
        until(lambda number=number: folder.counts.written == number + 1)  # type: ignore[misc]
        assert bytes_on_disk(tmp_path) <= budget
        time.sleep(0.01)  # times of files are that coarse
        folder.use(name(0))
    folder.close()
    left = [number for number in range(12) if path_of(tmp_path, number).exists()]
    assert 0 in left
    assert left[1:] == list(range(13 - len(left), 12))
    assert 3 <= len(left) <= 5
    fewer = opened(tmp_path, 2 * ON_DISK)
    fewer.close()
    assert bytes_on_disk(tmp_path) <= 2 * ON_DISK
    assert same(fewer.read(name(0)), 0)
    fewer.write(name(0), block(0))


def test_what_is_used_from_memory_is_used_on_disk(tmp_path: Path) -> None:
    """The first blocks last: without them the others are of no use."""
    cache = PrefixCache(1 << 20, folder=opened(tmp_path))
    cache.add([*range(96)], lambda first, last: block(first))
    cache.close()
    files = sorted(tmp_path.glob("*.prefix"))
    for file in files:
        os.utime(file, (0, 0))
    assert len(cache.find([*range(97)])) == len(files) == 3
    order = sorted(files, key=lambda file: file.stat().st_mtime_ns, reverse=True)
    names = [cache._before([*range(96)])]
    for first in (0, 32, 64):
        names.append(_name(names[-1], [*range(first, first + 32)]))
    assert [file.stem for file in order] == [known.hex() for known in names[1:]]
    assert order[-1].stat().st_mtime > 0


def test_a_deleted_folder_is_made_for_its_owner_again(tmp_path: Path) -> None:
    folder = opened(tmp_path / "kept")
    (tmp_path / "kept").rmdir()
    folder.write(name(1), block(1))
    folder.close()
    assert same(folder.read(name(1)), 1)
    assert stat.S_IMODE((tmp_path / "kept").stat().st_mode) == 0o700


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it has not come to it"
        time.sleep(0.002)


def test_what_is_too_much_at_a_time_is_not_written(tmp_path: Path) -> None:
    folder = opened(tmp_path, waiting=BYTES - 1)
    folder.write(name(1), block(1))
    folder.close()
    assert (folder.counts.skipped, folder.counts.written) == (1, 0)
    assert folder.read(name(1)) is None


def test_a_full_disk_costs_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = opened(tmp_path)

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with caplog.at_level(logging.WARNING, "torch_pi2"), monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        for number in range(3):
            folder.write(name(number), block(number))
        until(lambda: folder.counts.skipped == 3)
    (said,) = caplog.messages
    assert "blocks of prefixes are not kept in" in said
    assert "No space left on device" in said
    assert os.listdir(tmp_path) == []
    folder.write(name(5), block(5))
    folder.close()
    assert same(folder.read(name(5)), 5)


def test_what_killed_processes_leave_is_removed(tmp_path: Path) -> None:
    """But not what another is writing, nor what is somebody else's."""
    gone, busy, other = path_of(tmp_path, 1), path_of(tmp_path, 2), tmp_path / ".note.partial"
    for ending in ("partial", "lock"):
        gone.with_name(f".{gone.name}.{ending}").write_bytes(b"half")
    other.write_text("mine")
    with claimed(busy) as partial:
        partial.write_bytes(b"half")
        opened(tmp_path).close()
        assert sorted(os.listdir(tmp_path)) == sorted([f".{busy.name}.lock", f".{busy.name}.partial", other.name])
        folder = opened(tmp_path)
        folder.write(name(2), block(2))  # the other does it
        folder.close()
        assert (folder.counts.skipped, folder.counts.written) == (0, 0)


WRITER = """
import random, sys, torch
sys.path.insert(0, {here!r})
import test_prefix_folder as t
from pathlib import Path
folder, chance = t.opened(Path({path!r}), {budget}), random.Random({seed})
print("begun", flush=True)
for _ in range({rounds}):
    number = chance.randrange(40)
    found = folder.read(t.name(number))
    assert found is None or t.same(found, number), number
    folder.write(t.name(number), t.block(number))
    t.until(lambda: len(folder._queued) < 3)
folder.close()
assert folder.counts.damaged == 0, folder.counts
print("done", folder.counts.read, folder.counts.written, flush=True)
"""


def writer(path: Path, seed: int, rounds: int, budget: int) -> subprocess.Popen[str]:
    here = str(Path(__file__).parent)
    code = WRITER.format(here=here, path=str(path), seed=seed, rounds=rounds, budget=budget)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def test_servers_share_a_folder(tmp_path: Path) -> None:
    budget = 16 * ON_DISK
    with writer(tmp_path, 1, 400, budget) as one, writer(tmp_path, 2, 400, budget) as two:
        said = [process.communicate(timeout=120)[0].split() for process in (one, two)]
    for begun, done, read, written in said:
        assert (begun, done) == ("begun", "done")
        assert int(read) > 0
        assert int(written) > 0
    assert 4 * ON_DISK <= bytes_on_disk(tmp_path) <= budget + 2 * budget // 16
    every = opened(tmp_path)
    for number in range(40):
        assert (every.read(name(number)) is not None) == path_of(tmp_path, number).exists()
    every.close()
    assert every.counts.damaged == 0


def test_a_killed_server_leaves_whole_blocks(tmp_path: Path) -> None:
    chance = random.Random(0)
    for seed in range(3):
        with writer(tmp_path, seed, 1 << 30, 1 << 30) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            until(lambda: any(tmp_path.glob("*.prefix")))
            time.sleep(chance.random() / 20)
            process.send_signal(signal.SIGKILL)
    folder = opened(tmp_path, 1 << 30)
    folder.close()
    left = os.listdir(tmp_path)
    assert left
    assert all(file.endswith(".prefix") and not file.startswith(".") for file in left)
    assert all(same(folder.read(name(n)), n) for n in range(40) if path_of(tmp_path, n).exists())


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match=r"folder .*file: expected one that this user alone .*File exists"):
        opened(file)
    public = tmp_path / "public"
    public.mkdir()
    public.chmod(0o777)
    with pytest.raises(ConfigError, match=r"found one that others can write to.*chmod 700"):
        opened(public)
    if os.geteuid() == 0:
        foreign = tmp_path / "foreign"
        foreign.mkdir(mode=0o700)
        os.chown(foreign, 1000, 1000)
        with pytest.raises(ConfigError, match="found one that another user owns"):
            opened(foreign)
    with pytest.raises(ConfigError, match=r"bytes of .*expected 11264 or more: those of a block.*found 9999"):
        opened(tmp_path / "small", 9999)
    with pytest.raises(ConfigError, match=r"prefix_bytes: expected memory .*--prefix-cache"):
        Batch(made(), max_tokens=64, prefix_folder=tmp_path / "none")


def test_reading_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="found nothing"):
        read_block(tmp_path / "none", SPECS, IDENTITY, "x")


# --- of models ---


def made(**changes: Any) -> nn.Module:
    sizes = {"hidden_size": 256, "intermediate_size": 320, "num_attention_heads": 8, "num_key_value_heads": 2}
    settings = {"activations": "int8"} | {key: changes.pop(key) for key in ("activations",) if key in changes}
    config = transformers.LlamaConfig(
        **sizes | {"num_hidden_layers": 2, "vocab_size": 90, "hidden_act": "relu"} | changes
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    return torch_pi2.optimize(model, weights="int4", **settings)


def answers(model: nn.Module, prompts: list[list[int]], **settings: Any) -> tuple[list[list[Taken]], Batch]:
    """Tokens and log probabilities of the greedy answers."""
    batch = Batch(model, max_tokens=256, lanes=3, **settings)
    found: list[list[Taken]] = [[] for _ in prompts]
    for taken, ids in zip(found, prompts, strict=True):

        def tell(what: Any, taken: list[Taken] = taken) -> None:
            if isinstance(what, Taken):
                taken.append(what)

        batch.submit(Sequence(ids, 5, tell, top=0))
    batch.start()
    batch.close()
    return found, batch


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    chance = random.Random(0)
    stem = [chance.randrange(3, 90) for _ in range(150)]
    return [stem[:n] + [chance.randrange(3, 90) for _ in range(chance.randrange(1, 40))] for n in range(20, 150, 11)]


def test_answers_after_a_restart_have_the_same_bits(tmp_path: Path, prompts: list[list[int]]) -> None:
    wanted, _ = answers(made(), prompts)
    first, cold = answers(made(), prompts, prefix_bytes=1 << 24, prefix_folder=tmp_path)
    again, warm = answers(made(), prompts, prefix_bytes=1 << 24, prefix_folder=tmp_path)
    assert first == wanted == again
    assert cold.prefixes.folder is not None
    assert warm.prefixes.folder is not None
    assert cold.prefixes.folder.counts.read == 0
    assert cold.prefixes.folder.counts.written == len(os.listdir(tmp_path)) == warm.prefixes.folder.counts.read
    assert warm.prefixes.folder.counts.written == 0
    assert warm.prefixes.tokens_found == 32 * sum((len(ids) - 1) // 32 for ids in prompts)
    # little memory: most of what is found is read again and again
    little, small = answers(made(), prompts, prefix_bytes=40_000, prefix_folder=tmp_path)
    assert little == wanted
    assert small.prefixes.folder is not None
    assert small.prefixes.folder.counts.read > warm.prefixes.folder.counts.read
    assert small.prefixes.bytes <= 40_000


def test_a_damaged_block_that_two_threads_find_is_one(tmp_path: Path) -> None:
    """The one that reads prompts, and the one that writes."""
    filled(tmp_path, 1)
    folder, error = opened(tmp_path), ArtifactError("block", expected="sound bytes", found="others", fix="None.")
    folder.close()
    for _ in range(2):
        folder._count_damaged(name(1), error)
    assert folder.counts.damaged == 1
    assert not path_of(tmp_path, 1).exists()


def test_damaged_blocks_change_no_answer(tmp_path: Path, prompts: list[list[int]]) -> None:
    wanted, _ = answers(made(), prompts, prefix_bytes=1 << 24, prefix_folder=tmp_path)
    chance, files = random.Random(1), sorted(tmp_path.iterdir())
    spoiled = chance.sample(files, len(files) // 2)
    for file in spoiled:
        data = bytearray(file.read_bytes())
        data[chance.randrange(4096, len(data))] ^= 1 << chance.randrange(8)
        file.write_bytes(data)
    damaged = []
    for _ in spoiled:  # what follows a damaged block is not read, and so not found to be damaged before the next time
        found, batch = answers(made(), prompts, prefix_bytes=1 << 24, prefix_folder=tmp_path)
        assert found == wanted
        assert batch.prefixes.folder is not None
        counts = batch.prefixes.folder.counts
        assert counts.damaged == counts.written
        assert sorted(tmp_path.iterdir()) == files
        damaged.append(counts.damaged)
    assert damaged[0] > 0
    assert sum(damaged) == len(spoiled)


def test_models_share_a_folder_and_no_block(tmp_path: Path, prompts: list[list[int]]) -> None:
    """Also one that differs in nothing that its sizes show."""
    other = made(rope_theta=5000.0) if "rope_theta" in transformers.LlamaConfig().to_dict() else made(rms_norm_eps=1e-3)
    wanted, _ = answers(other, prompts)
    answers(made(), prompts, prefix_bytes=1 << 24, prefix_folder=tmp_path)
    found, batch = answers(other, prompts, prefix_bytes=1 << 24, prefix_folder=tmp_path)
    assert found == wanted
    assert batch.prefixes.folder is not None
    assert batch.prefixes.folder.counts.read == 0
    assert batch.prefixes.folder.counts.written > 0


@pytest.fixture(scope="module")
def same_model() -> str:
    return identity(made())


def test_the_identity_of_a_model(tmp_path: Path, same_model: str) -> None:
    """It is that of its folder wherever it lies, and after it has been used."""
    model = made()
    answers(model, [[3, 4, 5]])
    assert identity(model) == same_model
    torch_pi2.save(model, tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    one, two = (identity(torch_pi2.load(tmp_path / path, activations="int8")) for path in "ab")
    assert one == two
    assert one != identity(torch_pi2.load(tmp_path / "a"))
    torch_pi2.pack(tmp_path / "a", tmp_path / "s")
    shutil.copytree(tmp_path / "s", tmp_path / "t")
    stored = [identity(torch_pi2.load(tmp_path / path, activations="int8", budget="64MB")) for path in "st"]
    assert stored[0] == stored[1]
    assert stored[0] not in (one, same_model)


def test_the_identity_of_a_model_that_leaves_out_neurons(tmp_path: Path) -> None:
    torch_pi2.synthetic(tmp_path / "plain", "tiny", active=0.2, rank=16)
    torch_pi2.pack(tmp_path / "plain", tmp_path / "store")
    settings = [torch_pi2.OffloadConfig(miss_margin=margin) for margin in (0, 0, 1, 2)]
    found = [identity(torch_pi2.load(tmp_path / "store", budget="64MB", offload=of)) for of in settings]
    assert found[0] == found[1]
    assert len({*found}) == 3


def test_how_shards_are_added_is_in_the_identity(same_model: str) -> None:
    model, group = made(), SimpleNamespace(rank=0, size=2)
    of_chunks = [
        [Shard(rank, 2, {"a": ShardLayer(256, chunks)}) for rank, chunks in enumerate(both)]
        for both in (((0, 1), (2, 3)), ((0, 2), (1, 3)))
    ]
    found = [same_model]
    for shards, reduction in ((of_chunks[0], "chunks"), (of_chunks[0], "ranks"), (of_chunks[1], "chunks")):
        model.model.layers[0].mlp.share = Share(group, shards, "a", reduction)  # type: ignore[index, union-attr, arg-type]
        found.append(identity(model))
    assert len({*found}) == 4


def _other_bit(model: nn.Module) -> None:
    model.model.layers[1].self_attn.k_proj.rows[3, 7] ^= 1  # type: ignore[index, union-attr]


def _other_embedding(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_input_embeddings().weight[5, 5] += 1  # type: ignore[operator]


def _float_activations(model: nn.Module) -> None:
    model.model.layers[0].self_attn.v_proj.int8_activations = False  # type: ignore[index, union-attr]


def _other_epsilon(model: nn.Module) -> None:
    model.model.layers[0].input_layernorm.variance_epsilon *= 2  # type: ignore[index, union-attr]


def _other_threshold(model: nn.Module) -> None:
    model.model.layers[0].mlp.threshold += 0.5  # type: ignore[index, union-attr]


@pytest.mark.parametrize("change", [_other_bit, _other_embedding, _float_activations, _other_epsilon, _other_threshold])
def test_identities_of_other_models(same_model: str, change: Callable[[nn.Module], None]) -> None:
    model = made()
    change(model)
    assert identity(model) != same_model


def test_the_identity_of_another_version(same_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_pi2.serve import identity as module

    about = describe()
    about["versions"]["torch"] = "0.0.1"
    monkeypatch.setattr(module, "describe", lambda: about)
    assert identity(made()) != same_model


def test_stored_neurons_are_in_the_identity(tmp_path: Path) -> None:
    model = made()
    torch_pi2.save(model, tmp_path / "a")
    torch_pi2.pack(tmp_path / "a", tmp_path / "s")
    with torch.no_grad():
        model.model.layers[1].mlp.neuron_rows[7, 0, 3] ^= 1  # type: ignore[index, union-attr]
    torch_pi2.save(model, tmp_path / "b")
    torch_pi2.pack(tmp_path / "b", tmp_path / "t")
    one, two = (identity(torch_pi2.load(tmp_path / path, budget="64MB")) for path in "st")
    assert one != two
