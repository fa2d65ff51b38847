"""``torch_pi2.lead``: the first process decides what all compute; the bits of one machine, and errors that name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sharding import result_of_one, saved, together
from shared import shared_folder
from tiny_models import tiny

import torch_pi2
from torch_pi2.decode.decoder import Decoder
from torch_pi2.distributed.coordinator import Call, _packed, _unpacked
from torch_pi2.errors import ConfigError

#: Each of several processes has one, too.
pytestmark = pytest.mark.usefixtures("one_thread")

FEW = torch.arange(1, 6)[None]
ASKED = torch.tensor([[5, 6, 7, 8] * 4])

_BEGIN = """
import os, signal, threading, time, torch_pi2
from torch_pi2.layers.of_model import called_modules
from torch_pi2.decode.decoder import Decoder
few, asked = torch.arange(1, 6)[None], torch.tensor([[5, 6, 7, 8] * 4])
how = torch_pi2.GroupConfig(timeout_s=float([*sys.argv[7:], 3][0]))
model = torch_pi2.load(sys.argv[4], group=how)
(out / f"pid-{rank}").write_text(str(os.getpid()))

def tell_errors(*calls):
    for call in calls:
        try:
            print("no error", call())
        except torch_pi2.Pi2Error as error:
            print(type(error).__name__, error)
"""
#: After it only the coordinator's process goes on.
_LEAD = """
started = time.process_time()
coordinator = torch_pi2.lead(model)
if coordinator is None:
    print("through", time.process_time() - started)
    sys.exit()
"""
_EXIT = """
sys.stdout.flush()
os._exit(0)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``store`` of a model with ``2``, its shards; ``float/store`` of another one with ``float/stages``."""

    def make(base: Path) -> None:
        torch_pi2.synthetic(base / "plain", "tiny", active=0.2, weights="int4")
        torch_pi2.pack(base / "plain", base / "store")
        torch_pi2.pack(base / "store", base / "2", ranks=2)
        (base / "float").mkdir()
        saved(base / "float", tiny("llama-relu"), method="exact")
        torch_pi2.pack(base / "float" / "store", base / "float" / "stages", ranks=2, by="layers")

    return shared_folder(tmp_path_factory, "coordinated", make)


def _all_calls(model: torch.nn.Module, compiled: bool) -> list[torch.Tensor]:
    """Results of every call that can be broadcast."""
    with torch.no_grad():
        found = [model(FEW).logits, model(FEW, use_cache=False, attention_mask=torch.ones_like(FEW)).logits]
    decoder = Decoder(model, max_tokens=64, batch=3, logits=True, compiled=compiled)
    found.append(decoder.prompt(FEW))
    decoder.fork(2)
    found += [decoder.step(torch.tensor([[7], [9]])) for _ in range(12)]
    for _ in decoder.add(ASKED):
        found.append(decoder.step(torch.tensor([[7], [9]])))
    found.append(decoder.step(torch.tensor([[7], [9], [3]])))
    decoder.retain([2])
    group = model.torch_pi2.group
    known = [] if group and group.divides_kv else [decoder.copy_kv(0, 0, 8), decoder.copy_kv(0, 8, 15)]
    for _ in decoder.add(ASKED, known):
        pass
    chunks = decoder.add(FEW)
    next(chunks)
    chunks.close()  # type: ignore[attr-defined]
    found.append(decoder.step(torch.tensor([[8], [3]])))
    decoder.retain([0])
    found.append(decoder.verify(torch.tensor([[1, 2, 3]])))
    decoder.rollback(2)
    found.append(decoder.step(torch.tensor([[8]])))
    return found


#: Scripts import this file by it.
_IMPORT = f"""
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_coordinator
"""
_CALLS = """
torch.save(test_coordinator._all_calls(model, sys.argv[5] == "compiled"), out / "found.pt")
coordinator.close()
"""


@pytest.mark.parametrize(
    ("store", "shards", "compiled"),
    [
        ("store", "2", ""),
        ("float/store", "float/stages", ""),
        pytest.param("store", "2", "compiled", marks=[pytest.mark.slow, pytest.mark.long]),
    ],
)
def test_all_calls_have_the_bits_of_one_machine(
    folder: Path, tmp_path: Path, store: str, shards: str, compiled: str
) -> None:
    said = together(tmp_path, _BEGIN + _LEAD + _IMPORT + _CALLS, 2, folder / shards, compiled, "", 60)
    assert said[1].startswith("through ")
    found = torch.load(tmp_path / "found.pt")
    wanted = result_of_one(folder / store, f"test_coordinator._all_calls(model, {bool(compiled)})", _IMPORT)
    for i, (of_two, of_one) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(of_two, of_one), i


@pytest.mark.slow
def test_answers_while_the_others_wait_for_longer_than_the_timeout(folder: Path, tmp_path: Path) -> None:
    script = """
with coordinator:
    for pause in (0, 4):
        time.sleep(pause)
        plain = torch_pi2.generate(model, asked, max_new_tokens=12)
    drafted = torch_pi2.generate(model, asked, max_new_tokens=24, prompt_lookup=3)
    drawn = torch_pi2.generate(model, few, max_new_tokens=12, num_return_sequences=2, do_sample=True, seed=3)
    by_transformers = model.generate(few, max_new_tokens=12, do_sample=False)
    compiled = torch.compile(model, backend="eager")(few).logits
    within = torch.compile(lambda ids: model(ids).logits + 1, backend="eager")(few)
    same = torch.equal(compiled, model(few).logits), torch.equal(within, compiled + 1)
print(plain.sequences, drafted.sequences, drawn.sequences, by_transformers.tolist(), same)
"""
    first, second = together(tmp_path, _BEGIN + _LEAD + script, 2, folder / "2")
    model = torch_pi2.load(folder / "store", budget="1GiB")
    plain = torch_pi2.generate(model, ASKED, max_new_tokens=12)
    drafted = torch_pi2.generate(model, ASKED, max_new_tokens=24)
    drawn = torch_pi2.generate(model, FEW, max_new_tokens=12, num_return_sequences=2, do_sample=True, seed=3)
    greedy = model.generate(FEW, max_new_tokens=12, do_sample=False)  # type: ignore[operator]
    assert first == f"{plain.sequences} {drafted.sequences} {drawn.sequences} {greedy.tolist()} (True, True)\n"
    name, seconds = second.split()
    assert name == "through"
    assert float(seconds) < 6  # of a processor: it sleeps while it waits


def test_what_cannot_be_broadcast_is_refused(folder: Path, tmp_path: Path) -> None:
    script = """
decoder = Decoder(model, max_tokens=64, compiled=False)
tell_errors(
    lambda: before.prompt(few),
    lambda: torch_pi2.lead(model),
    lambda: model(few, past_key_values=decoder._kv),
    lambda: Decoder(model, max_tokens=64, backend=lambda *_: None),
    lambda: decoder.step(few),
    lambda: decoder.prompt(torch.full((1, 3), 10**6)),
    lambda: decoder.prompt(few) + decoder.step(torch.tensor([[10**6]])),
    lambda: model(torch.tensor([[10**6]])),
    lambda: model(input_ids=torch.tensor([[-1]])),
    lambda: decoder.copy_kv(1, 0, 4),
    lambda: decoder.copy_kv(0, 0, 6),
)
print(decoder.prompt(few).tolist())
coordinator.close()
"""
    before = "before = Decoder(model, max_tokens=64)\n"
    said, _ = together(tmp_path, _BEGIN + before + _LEAD + script, 2, folder / "2")
    of_several = "of a model that several processes compute: expected"
    no_tokens = "ShapeError copy_kv: expected tokens, 1 or more, of a sequence that there is (now [5]),"
    for line, expected in zip(
        said.splitlines()[:-1],
        (
            f"ConfigError Decoder {of_several} one that was made after torch_pi2.lead, found an older one or a copy",
            "ConfigError lead(model): expected a model in shards, which several processes compute and no coordinator",
            f"ConfigError model(...) {of_several} numbers, text and tensors, which can be sent to the others, found",
            f"ConfigError Decoder(...) {of_several} numbers",
            "ShapeError decoding step: expected a prompt before it",
            "ConfigError prompt: expected tokens of 0 to",
            "ConfigError token: expected tokens of 0 to",
            "ConfigError input_ids: expected tokens of 0 to",
            "ConfigError input_ids: expected tokens of 0 to",
            f"{no_tokens} found 0 to 4 of row 1",
            f"{no_tokens} found 0 to 6 of row 0",
        ),
        strict=True,
    ):
        assert line.startswith(expected), line
    one = Decoder(torch_pi2.load(folder / "store", budget="1GiB"), max_tokens=64, compiled=False)
    assert said.splitlines()[-1] == str(one.prompt(FEW).tolist())
    with pytest.raises(ConfigError, match=r"lead\(model\): expected .* found one that this process computes alone"):
        torch_pi2.lead(tiny("llama-relu"))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["idle", "busy", "coordinator"])
def test_a_killed_process_is_named(folder: Path, tmp_path: Path, how: str) -> None:
    script = """
try:
    coordinator = torch_pi2.lead(model)
    torch_pi2.generate(model, few, max_new_tokens=3)
    killed = int((out / f"pid-{int(sys.argv[5] != 'coordinator')}").read_text())
    if sys.argv[5] == "busy":
        threading.Timer(0.3, os.kill, (killed, 9)).start()
        torch_pi2.generate(model, few, max_new_tokens=5000)
    os.kill(killed, 9)
    until = time.monotonic() + 3
    while model.torch_pi2.group.failure is None and time.monotonic() < until:
        time.sleep(0.05)
    print("noticed", model.torch_pi2.group.failure is not None)
    torch_pi2.generate(model, few, max_new_tokens=3)
except torch_pi2.errors.GroupError as error:
    print("raised", model.torch_pi2.group.failure)
    coordinator = None if rank else coordinator.close()
"""
    victim = int(how != "coordinator")
    codes = [0, -9] if victim else [-9, 0]
    said = together(tmp_path, _BEGIN + script + _EXIT, 2, folder / "2", how, codes=codes)
    survivor = said[1 - victim].splitlines()
    assert f"expected an answer of each within 3 s, found none of process {victim}. See what it says" in survivor[-1]
    assert survivor[-1].startswith("raised 2 processes that compute one model")
    assert how != "idle" or survivor[0] == "noticed True"


@pytest.mark.slow
def test_a_killed_process_is_named_in_compiled_code(folder: Path, tmp_path: Path) -> None:
    """The user's own ``torch.compile``."""
    script = """
compiled = torch.compile(model, backend="torch_pi2")
try:
    with torch.no_grad():
        compiled(few)
        if rank:
            os.kill(os.getpid(), 9)
        compiled(few)
except torch_pi2.errors.GroupError as error:
    print(error)
"""
    said, _ = together(tmp_path, _BEGIN + script + _EXIT, 2, folder / "2", codes=[0, -9])
    assert "expected an answer of each within 3 s, found none of process 1. See what it says" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("who", "where"), [(0, "it failed only there"), (1, "only this process refused it: hook: exp")]
)
def test_a_call_that_ends_differently_elsewhere_ends_the_group(
    folder: Path, tmp_path: Path, who: int, where: str
) -> None:
    script = """
def wrong(*_):
    raise torch_pi2.errors.ConfigError("hook", expected="a", found="b", fix="c")

if rank == int(sys.argv[5]):
    model.register_forward_hook(wrong)
try:
    coordinator = torch_pi2.lead(model)
    tell_errors(*[lambda: model(few)] * 2)
except torch_pi2.errors.GroupError as error:
    print(error)
"""
    first, second = together(tmp_path, _BEGIN + script + _EXIT, 2, folder / "2", who)
    assert "call of process 0 in process 1: expected the same result in all processes, found that " + where in second
    assert "found none of process 1, which says: GroupError: call of process 0 in process 1" in first


@pytest.mark.slow
def test_a_signal_within_a_call_is_handled_after_it(folder: Path, tmp_path: Path) -> None:
    script = """
decoder = Decoder(model, max_tokens=4000, compiled=False)
token, ended = decoder.prompt(few), 0
while ended < 10:
    threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        while True:
            token = decoder.step(token)
    except KeyboardInterrupt:
        ended += 1
print(decoder.length > 10, torch_pi2.generate(model, few, max_new_tokens=5).sequences)
coordinator.close()
"""
    first, second = together(tmp_path, _BEGIN + _LEAD + script, 2, folder / "2")
    model = torch_pi2.load(folder / "store", budget="1GiB")
    assert first == f"True {torch_pi2.generate(model, FEW, max_new_tokens=5).sequences}\n"
    assert second.startswith("through")


def test_messages_are_received_as_they_were_sent() -> None:
    tensors = [torch.randn(3, 4).bfloat16(), torch.zeros(2, 0), torch.tensor(7), torch.tensor([True, False])]
    call = Call("step", 3, [tensors, None, 1.5, "a\n", True, range(2)], {"x": tensors[0]}, True, [1, 2], True)
    found = _unpacked(_packed(call))
    assert (found.name, found.target, found.sparse, found.gone, found.raised) == ("step", 3, True, [1, 2], True)
    assert found.args[1:6] == [None, 1.5, "a\n", True, [0, 1]]
    for one, other in zip([*found.args[0], found.kwargs["x"]], [*tensors, tensors[0]], strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one, other)
    with pytest.raises(ConfigError, match=r"step\(\.\.\.\) of a model .* found a set"):
        _packed(Call("step", 3, [{1}]))
