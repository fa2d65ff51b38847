"""Bundles that run: greedy against PyTorch, sampling, several sequences, the end of answers, and what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pte
import pytest
import torch
from tiny_bundle import EOS, LANES, PROMPT, ROOM, TEMPLATE, VOCAB, TinyDecoder, shared_bundle

from torch_pi2.errors import (
    ArtifactError,
    ConfigError,
    DtypeError,
    Pi2Error,
    ShapeError,
    StaleArtifactError,
    VersionError,
)
from torch_pi2.export.describe import describe_program
from torch_pi2.export.manifest import Manifest, MethodEntry, Model, describe_files
from torch_pi2.export.run import Bundle


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_bundle(tmp_path_factory)


@pytest.fixture(scope="module")
def bundle(folder: Path) -> Iterator[Bundle]:
    with Bundle(folder) as opened:
        yield opened


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    """One that may be changed."""
    return Path(shutil.copytree(folder, tmp_path / "bundle"))


@torch.no_grad()
def eager(ids: list[int], count: int = 0) -> tuple[torch.Tensor, list[int]]:
    """PyTorch's logits ``[len(ids) + count - 1, V]``, a token at a time, and ``count`` greedy tokens."""
    model, rows, lane = TinyDecoder().eval(), [], torch.zeros(1, dtype=torch.int64)
    ids, answer = list(ids), []
    for position in range(len(ids) + max(count, 1) - 1):
        if position == len(ids):
            ids.append(int(rows[-1].argmax()))
            answer.append(ids[-1])
        rows.append(model.logits(torch.tensor([[ids[position]]]), torch.tensor([[position]]), lane)[0, 0])
    return torch.stack(rows), [*answer, int(rows[-1].argmax())] if count else []


@pytest.mark.parametrize("length", [1, 5, PROMPT, PROMPT + 1, 2 * PROMPT + 3])
def test_greedy_is_pytorchs_and_the_same_each_time(bundle: Bundle, length: int) -> None:
    """Prompts longer than what forward takes are read in pieces."""
    ids = [(7 * i + 5) % VOCAB for i in range(length)]
    _, wanted = eager(ids, 10)
    assert EOS not in wanted
    first = bundle.generate(ids, 10)
    assert first.prompt_ids == ids
    assert first.sequences[0].ids == wanted
    assert first.sequences[0].ended == "length"
    assert first.decode_steps == 9
    again = bundle.generate(torch.tensor([ids]), 10)
    assert again.sequences == first.sequences


def test_logits_are_pytorchs_and_bit_for_bit_deterministic(bundle: Bundle) -> None:
    ids = list(range(30, 50))
    wanted, _ = eager(ids)
    alone = bundle.logits(ids)
    torch.testing.assert_close(alone, wanted, rtol=0, atol=1e-4)
    torch.testing.assert_close(bundle.logits(ids, prompt=len(ids)), wanted[-1:], rtol=0, atol=1e-4)
    torch.testing.assert_close(bundle.logits(ids, prompt=7), wanted[6:], rtol=0, atol=1e-4)
    assert torch.equal(bundle.logits(ids), alone)


def test_an_answer_ends_at_the_room(bundle: Bundle) -> None:
    ids = list(range(40, 40 + ROOM - 3))
    made = bundle.generate(ids)
    assert (len(made.sequences[0].ids), made.sequences[0].ended) == (3, "room")
    assert made.sequences[0].ids == eager(ids, 3)[1]
    assert len(bundle.generate([*ids[:-1], 5, 6], 9).sequences[0].ids) == 2
    with pytest.raises(
        ShapeError, match=rf"prompt: expected at most {ROOM - 1} tokens.*room for {ROOM}.*found {ROOM}\."
    ):
        bundle.generate(list(range(ROOM)))
    with pytest.raises(ShapeError, match=rf"found {ROOM + 5}\."):
        bundle.generate([1] * (ROOM + 5))


def with_eos(bundle: Bundle, *tokens: int) -> Bundle:
    object.__setattr__(bundle.manifest, "eos", tokens)
    return bundle


@pytest.fixture
def own(folder: Path) -> Iterator[Bundle]:
    """A bundle whose end tokens may be changed."""
    with Bundle(folder) as opened:
        yield opened


def test_an_answer_ends_at_eos(own: Bundle) -> None:
    ids = [5, 6, 7, 8, 9]
    wanted = eager(ids, 10)[1]
    end = next(i for i, token in enumerate(wanted) if token not in wanted[:i] and i >= 3)
    answer = with_eos(own, wanted[end], VOCAB + 1).generate(ids, 10).sequences[0]
    assert answer.ids == wanted[: end + 1]
    assert answer.ended == "eos"
    assert answer.text == with_eos(own).generate(ids, end).sequences[0].text  # that of eos is not part of it
    assert with_eos(own, wanted[0]).generate(ids, 10).sequences[0].ids == wanted[:1]


def test_sampling_is_seeded_and_sequences_are_independent(bundle: Bundle) -> None:
    ids = [3, 1, 4, 1, 5]
    several = bundle.generate(ids, 12, temperature=1.0, seed=5, num_return_sequences=LANES)
    assert len({tuple(s.ids) for s in several.sequences}) == LANES
    assert bundle.generate(ids, 12, temperature=1.0, seed=5, num_return_sequences=LANES).sequences == several.sequences
    for i in (0, 3):
        alone = bundle.generate(ids, 12, temperature=1.0, seed=5 + i)
        assert alone.sequences[0].ids == several.sequences[i].ids
    three = bundle.generate(ids, 12, temperature=1.0, seed=5, num_return_sequences=3)
    assert three.sequences == several.sequences[:3]
    assert bundle.generate(ids, 12, temperature=1.0, seed=6).sequences[0].ids == several.sequences[1].ids


def test_sequences_end_at_their_own_times(own: Bundle) -> None:
    """Whatever ends when, each sequence is what it is alone."""
    with_eos(own, *range(0, VOCAB, 6))
    for seed in range(0, 24, 4):
        made = own.generate([9, 8, 7], 12, temperature=1.5, seed=seed, num_return_sequences=LANES)
        assert made.decode_steps == max(len(s.ids) for s in made.sequences) - 1
        for i, sequence in enumerate(made.sequences):
            assert own.generate([9, 8, 7], 12, temperature=1.5, seed=seed + i).sequences == [sequence]


def test_a_stream_is_the_text(bundle: Bundle) -> None:
    got: dict[int, list[tuple[int, str]]] = {}
    made = bundle.generate(
        "def f1(x", 15, temperature=1.0, seed=1, num_return_sequences=2,
        stream=lambda i, token, text: got.setdefault(i, []).append((token, text)),
    )  # fmt: skip
    for i, sequence in enumerate(made.sequences):
        assert [token for token, _ in got[i]] == sequence.ids
        assert "".join(text for _, text in got[i]) == sequence.text
    assert made.prompt_ids == bundle.tokenizer("def f1(x")["input_ids"]
    assert made.text == made.sequences[0].text


def test_chat(bundle: Bundle) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    ids = bundle.tokenizer("system: be brief\nuser: hi\n")["input_ids"]
    assert TEMPLATE.count("role") == 1
    assert bundle.generate(messages, 2).prompt_ids == ids
    template, bundle.tokenizer.chat_template = bundle.tokenizer.chat_template, None
    try:
        with pytest.raises(ConfigError, match=r"chat: expected a tokenizer with a chat template, found none in tokeni"):
            bundle.generate(messages, 2)
    finally:
        bundle.tokenizer.chat_template = template


def test_a_stream_cannot_call_its_bundle(folder: Path) -> None:
    """Another answer would be written over the keys and values of this one."""
    with Bundle(folder) as opened:
        wanted = opened.generate([5, 6, 7], 9).sequences
        calls: list[Callable[[], object]] = [
            lambda: opened.generate([9, 8], 3),
            lambda: opened.logits([9, 8]),
            opened.close,
        ]
        for call in calls:
            with pytest.raises(ConfigError, match=r"expected one call at a time: .*, found a call within another"):
                opened.generate([5, 6, 7], 9, stream=lambda *_, call=call: call())
            assert opened.generate([5, 6, 7], 9, stream=lambda *_: opened.stats()).sequences == wanted


def test_wrong_arguments_are_refused(bundle: Bundle) -> None:
    for given, message in (
        ({"temperature": -1.0}, r"temperature: expected a number, 0 or more, found -1\.0"),
        ({"temperature": float("nan")}, r"temperature: expected a finite number, found nan"),
        ({"top_p": 0.0}, r"top_p: expected a number, above 0, at most 1, found 0\.0"),
        ({"num_return_sequences": 5}, r"num_return_sequences: expected 1 to 4, the lanes of the bundle, found 5"),
        ({"max_new_tokens": 0}, r"max_new_tokens: expected a whole number, 1 or more, found 0"),
        ({"max_new_tokens": 2.5}, "max_new_tokens"),
        ({"temperature": 1 << 2000}, "temperature"),
        ({"top_k": 1.0}, "top_k"),
        ({"stop": ["a", 5]}, "stop"),
        ({"stream": 5}, "stream"),
        ({"seed": 10**30}, r"seed: expected a whole number, 0 or more, at most 4611686018427387904, f"),
    ):
        with pytest.raises(ConfigError, match=message):
            bundle.generate([1, 2], **given)
    for prompt, message in (
        ([], r"prompt: .* found no tokens"),
        ("", r"prompt: .* found no tokens"),
        (5, "prompt"),
        ({"role": "user"}, "prompt"),
        ([True], "prompt"),
        ("a\udcff", r"prompt: expected text, found half a character"),
        ([1, VOCAB], rf"tokens of one sequence below {VOCAB}, found the token {VOCAB}"),
        (torch.zeros(2, 3, dtype=torch.int64), "found no tokens"),
    ):
        with pytest.raises(ConfigError, match=message):
            bundle.generate(prompt, 2)
    with pytest.raises(ConfigError, match=r"expected a bundle of kind module, found decoder"):
        bundle(torch.zeros(1))
    with pytest.raises(ShapeError, match=r"prompt: expected 1 to 3 tokens, found 4"):
        bundle.logits([1, 2, 3], prompt=4)


def test_without_a_tokenizer_ids_work_and_text_does_not(copied: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (copied / name).unlink()
        edit(copied, lambda d, name=name: d["files"].pop(name))
    with Bundle(copied) as opened:
        made = opened.generate([5, 6, 7], 3)
        assert (made.sequences[0].ids, made.text) == (eager([5, 6, 7], 3)[1], "")
        with pytest.raises(ArtifactError, match=r"tokenizer of .*: expected tokenizer\.json"):
            opened.generate("def", 3)


def edit(folder: Path, change: Any) -> None:
    manifest = Manifest.load(folder).to_json()
    change(manifest)
    Manifest.from_json(manifest).save(folder)


def test_a_damaged_bundle_is_refused_by_name(copied: Path) -> None:
    whole = (copied / "model.pte").read_bytes()
    (copied / "model.pte").write_bytes(whole[:-100])
    with pytest.raises(
        ArtifactError, match=r"model\.pte: expected \d+ bytes, as manifest\.json says, found .* it is cut"
    ):
        Bundle(copied)
    (copied / "model.pte").write_bytes(b"x" * len(whole))
    with pytest.raises(ArtifactError, match=r"model\.pte: expected CRC32C \w{8}, as .*: it was changed or damaged"):
        Bundle(copied)
    with pytest.raises(ArtifactError, match=r"model\.pte: expected CRC32C \w{8} and SHA-256"):
        Bundle(copied, verify=True)
    with pytest.raises(ArtifactError, match=r"model\.pte: expected a program of ExecuTorch, found "):
        Bundle(copied, verify=False)
    (copied / "model.pte").write_bytes(whole)
    (copied / "model.pi2").unlink()
    with pytest.raises(ArtifactError, match=r"model\.pi2: expected 4096 bytes.*found no such file"):
        Bundle(copied)


def changes(path: Path, count: int) -> Iterator[int]:
    """Change one bit of the file, at ``count`` places all over it, one after the other; where it is."""
    whole = path.read_bytes()
    for at in sorted({i * (len(whole) - 1) // (count - 1) for i in range(count)}):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
        yield at
    path.write_bytes(whole)


def test_one_changed_bit_of_any_file_is_refused_by_name(copied: Path) -> None:
    """But of the store: its parts are compared when they are read."""
    names = {*Manifest.load(copied).files, "manifest.json"} - {"model.pi2"}
    assert {"model.pte", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= names
    for name in names:
        for at in changes(copied / name, 60):
            with pytest.raises(ArtifactError) as refused:
                Bundle(copied)
            assert refused.value.what.startswith(str(copied / name)), (name, at)
    with Bundle(copied) as opened:
        assert opened.generate([5, 6, 7], 3).sequences[0].ids == eager([5, 6, 7], 3)[1]


@pytest.mark.slow
def test_one_changed_bit_of_the_store_is_refused_or_never_read(module: Path, layer: pte.Layer, tmp_path: Path) -> None:
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(2))
    folder = Path(shutil.copytree(module, tmp_path / "bundle"))
    refused = []
    for _ in changes(folder / "model.pi2", 200):
        try:
            with Bundle(folder) as opened:
                assert torch.equal(opened(x), layer(x))
        except Pi2Error as error:
            refused.append(str(error))
    assert len(refused) > 100  # the others are padding
    assert all(str(folder / "model.pi2") in message for message in refused)
    next(changes(folder / "model.pi2", 200))
    with pytest.raises(ArtifactError, match=r"model\.pi2: expected CRC32C"):
        Bundle(folder, verify=True)


def test_another_executorch_is_refused(copied: Path) -> None:
    edit(copied, lambda d: d["made_by"].update(executorch="1.4.1"))
    with pytest.raises(VersionError, match=r"expected one of ExecuTorch 1\.5\.1, which is installed, found 1\.4\.1"):
        Bundle(copied)


def test_budgets_and_options(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(
        ConfigError, match=r"budget for .*: expected more than 1 MiB, which it takes without any neurons"
    ):
        Bundle(folder, budget="1MiB")
    with pytest.raises(ConfigError, match=r"budget: expected bytes, or text"):
        Bundle(folder, budget="much")
    with pytest.raises(
        ConfigError, match=r"option engine of Pi2Backend: expected auto, io_uring or pread, found 'fast'"
    ):
        Bundle(folder, engine="fast")
    with Bundle(folder, budget="2MiB", threads=1, io_threads=2, engine="pread", policy="lru", direct=False) as opened:
        assert opened._program.options["cache_bytes_kib"] == 4  # no more than the store has
        assert opened.stats() == {"hit_rate": None, "wait_share": None}  # this program has no delegate of ours
    assert not caplog.records


def test_what_a_program_consists_of(folder: Path, tmp_path: Path) -> None:
    found = describe_program(folder / "model.pte")
    assert set(found["methods"]) == {"forward", "decode_b1", "decode_b2", "decode_b4", "fork", "get_max_context_len"}
    assert found["methods"]["decode_b1"]["delegates"]["XnnpackBackend"] > 1
    assert found["methods"]["decode_b2"]["delegates"] == {}
    assert found["methods"]["decode_b2"]["operators"]["aten::index_put.out"] == 2
    assert found["named_bytes"] > VOCAB * 16 * 4  # the head's weights
    cut = tmp_path / "cut.pte"
    for size in (0, 5, 60, 2000, (folder / "model.pte").stat().st_size - 1):
        cut.write_bytes((folder / "model.pte").read_bytes()[:size])
        with pytest.raises(ArtifactError, match=r"cut\.pte: expected a whole program of ExecuTorch, found damage"):
            describe_program(cut)
    with pytest.raises(ArtifactError, match=r"nothing\.pte: expected a whole program"):
        describe_program(tmp_path / "nothing.pte")


@pytest.fixture(scope="module")
def layer() -> pte.Layer:
    return pte.layer(hidden=32, neurons=96, seed=1)


def module_bundle(folder: Path, one: pte.Layer) -> Path:
    """A bundle of kind "module": one call of our delegate on ``[T, 32]``, T at most 8."""
    folder.mkdir()
    store = pte.Store(folder / "model.pi2", [one])
    example = torch.zeros(4, 32)
    pte.one_call(folder / "model.pte", store.blob().pack(), example, torch.export.Dim("tokens", min=1, max=8))
    files = describe_files(folder)
    Manifest(
        kind="module",
        target="xnnpack",
        made_by={"executorch": "1.5.1+cpu"},
        files=files,
        model=Model("Layer", None, pte.HASH.hex(), "float32", "float32", 1, 32, None),
        methods={"forward": MethodEntry("forward", 1, 8)},
        max_tokens=8,
        lanes=1,
        pte_bytes=files["model.pte"].bytes,
        store_bytes=files["model.pi2"].bytes,
        ffn_bytes=96 * 3 * 32 * 4,
        fixed_bytes=1 << 20,
        token_bytes=96 * 3 * 32 * 4,
    ).save(folder)
    return folder


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory, layer: pte.Layer) -> Path:
    return module_bundle(tmp_path_factory.mktemp("module") / "bundle", layer)


def test_a_module_runs_over_its_store(module: Path, layer: pte.Layer) -> None:
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(2))
    with Bundle(module) as opened:
        assert torch.equal(opened(x), layer(x))
        found = opened.stats()
        assert (found["hit_rate"], found["wanted"], Path(found["path"])) == (1.0, 96, opened.store)
        assert 0 <= found["wait_share"] <= 1
        opened.stats(reset=True)
        assert opened.stats()["hit_rate"] is None
        for wrong, kind, message in (
            (x.double(), DtypeError, r"forward, input 0: expected torch\.float32, found torch\.float64"),
            (torch.zeros(9, 32), ShapeError, r"forward, input 0: expected at most \[8, 32\], found \[9, 32\]"),
            (torch.zeros(2, 2, 32), ShapeError, r"found \[2, 2, 32\]"),
        ):
            with pytest.raises(kind, match=message):
                opened(wrong)
        with pytest.raises(ShapeError, match=r"forward: expected 1 inputs, found 2"):
            opened(x, x)
        with pytest.raises(DtypeError, match=r"forward, input 0: expected a tensor, found list\. "):
            opened(x.tolist())
        with pytest.raises(ConfigError, match=r"generate of .*: expected a bundle of kind decoder, found module"):
            opened.generate([1])
        assert torch.equal(opened(x), layer(x))


def test_a_budget_is_what_the_cache_gets(module: Path, layer: pte.Layer, caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(1, 32, generator=torch.Generator().manual_seed(2))
    with Bundle(module, budget=(1 << 20) + 12 * 1024, preload=False) as opened:
        assert torch.equal(opened(x), layer(x))
        assert torch.equal(opened(x), layer(x))
        found = opened.stats()
        assert 0 < found["cache_bytes"] <= 12 * 1024
        assert found["bytes_read"] > 0
    assert "holds less than the 0.0 MiB of neurons that a token wants" in caplog.text
    with Bundle(module) as opened:  # options of one bundle are not those of the next
        opened(x)
        assert opened.stats()["cache_bytes"] >= 96 * 3 * 32 * 4


def test_the_store_elsewhere_and_what_is_wrong_with_it(module: Path, layer: pte.Layer, tmp_path: Path) -> None:
    x = torch.ones(1, 32)
    good = Path(shutil.copy(module / "model.pi2", tmp_path / "moved.pi2"))
    with Bundle(module, store=good) as opened:
        assert torch.equal(opened(x), layer(x))
        assert Path(opened.stats()["path"]) == good
    with Bundle(module, store=module) as opened:
        assert opened.store == module / "model.pi2"
    apart = Path(shutil.copytree(module, tmp_path / "apart"))
    (apart / "model.pi2").unlink()
    with Bundle(apart, store=good, verify=True) as opened:
        assert torch.equal(opened(x), layer(x))
    with pytest.raises(ArtifactError, match=r"nowhere\.pi2: expected \d+ bytes, .*found no such file"):
        Bundle(module, store=tmp_path / "nowhere.pi2")
    other = tmp_path / "other.pi2"
    pte.Store(other, [layer], model_hash=bytes(32))
    with pytest.raises(StaleArtifactError, match=rf"other\.pi2: expected weights {pte.HASH.hex()[:8]}, found 0{{8}}\."):
        Bundle(module, store=other)
    good.write_bytes(good.read_bytes()[:-4096])
    with pytest.raises(ArtifactError, match=r"moved\.pi2: expected \d+ bytes, .*, found \d+ bytes: it is cut"):
        Bundle(module, store=good)


def test_a_trace_is_written_when_it_is_closed(module: Path, tmp_path: Path) -> None:
    with Bundle(module, trace=tmp_path / "trace.json") as opened:
        opened(torch.ones(2, 32))
    assert "traceEvents" in (tmp_path / "trace.json").read_text()


def test_a_trace_that_cannot_be_written_is_said(module: Path, tmp_path: Path) -> None:
    message = "trace {}: expected a file that can be written, found .* Give option trace another one"
    with pytest.raises(ConfigError, match=message.format(tmp_path)):
        Bundle(module, trace=tmp_path)
    full = Path("/dev/full")
    opened = Bundle(module, trace=full)
    with pytest.raises(ConfigError, match=message.format(full)):
        opened.close()
    opened.close()  # it is closed
    with pytest.raises(KeyError), Bundle(module, trace=full):
        raise KeyError  # what went wrong first is what is said
