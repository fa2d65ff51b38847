"""One process leads, the others make its calls: the bits of one machine, idle for long, and ends of all kinds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sharding import saved, together
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
from torch_pi2.decode.decoder import Decoder
few, asked = torch.arange(1, 6)[None], torch.tensor([[5, 6, 7, 8] * 4])
how = torch_pi2.GroupConfig(timeout_s=float([*sys.argv[7:], 3][0]))
model = torch_pi2.load(sys.argv[4], group=how)
(out / f"pid-{rank}").write_text(str(os.getpid()))
"""
#: After it there is the leader alone.
_LEAD = """
started = time.process_time()
leader = torch_pi2.lead(model)
if leader is None:
    print("through", time.process_time() - started)
    sys.exit()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's ``store``, and ``2``, its shards; of another one, in ``stages``, too."""

    def make(base: Path) -> None:
        torch_pi2.synthetic(base / "plain", "tiny", active=0.2, weights="int4")
        torch_pi2.pack(base / "plain", base / "store")
        torch_pi2.pack(base / "store", base / "2", ranks=2)
        (base / "float").mkdir()
        saved(base / "float", tiny("llama-relu"), method="exact")
        torch_pi2.pack(base / "float" / "store", base / "float" / "stages", ranks=2, by="layers")

    return shared_folder(tmp_path_factory, "led", make)


def _all_calls(model: torch.nn.Module, compiled: bool) -> list[torch.Tensor]:
    """What one machine finds, as ``_CALLS`` asks it."""
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
    for _ in decoder.add(ASKED, [decoder.copy_kv(0, 0, 8), decoder.copy_kv(0, 8, 15)]):
        pass
    pieces = decoder.add(FEW)
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    found.append(decoder.step(torch.tensor([[8], [3]])))
    decoder.retain([0])
    found.append(decoder.verify(torch.tensor([[1, 2, 3]])))
    decoder.rollback(2)
    found.append(decoder.step(torch.tensor([[8]])))
    return found


_CALLS = """
import inspect, test_lead
found = test_lead._all_calls(model, sys.argv[5] == "compiled")
torch.save(found, out / "found.pt")
"""


@pytest.mark.parametrize(
    ("store", "shards", "compiled"),
    [
        ("store", "2", ""),
        ("float/store", "float/stages", ""),
        pytest.param("store", "2", "compiled", marks=pytest.mark.slow),
        pytest.param("float/store", "float/stages", "compiled", marks=[pytest.mark.slow, pytest.mark.long]),
    ],
)
def test_all_calls_have_the_bits_of_one_machine(
    folder: Path, tmp_path: Path, store: str, shards: str, compiled: str
) -> None:
    here = f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    script = _BEGIN + _LEAD + here + _CALLS + "leader.close()"
    said = together(tmp_path, script, 2, folder / shards, compiled, "", 60)  # seconds: others may compile
    assert said[1].startswith("through ")
    found = torch.load(tmp_path / "found.pt")
    wanted = _all_calls(torch_pi2.load(folder / store, budget="1GiB"), bool(compiled))
    assert len(found) == len(wanted)
    for i, (led, alone) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(led, alone), i


def test_answers_while_the_others_wait_for_longer_than_patience(folder: Path, tmp_path: Path) -> None:
    script = """
with leader:
    for pause in (0, 5):
        time.sleep(pause)  # longer than timeout_s
        plain = torch_pi2.generate(model, asked, max_new_tokens=12)
    guessed = torch_pi2.generate(model, asked, max_new_tokens=24, prompt_lookup=3)
    drawn = torch_pi2.generate(model, few, max_new_tokens=12, num_return_sequences=2, do_sample=True, seed=3)
    by_transformers = model.generate(few, max_new_tokens=12, do_sample=False)
    waits = time.process_time()
    time.sleep(3)
print(plain.sequences, guessed.sequences, drawn.sequences, by_transformers.tolist())
"""
    first, second = together(tmp_path, _BEGIN + _LEAD + script, 2, folder / "2")
    model = torch_pi2.load(folder / "store", budget="1GiB")
    plain = torch_pi2.generate(model, ASKED, max_new_tokens=12)
    guessed = torch_pi2.generate(model, ASKED, max_new_tokens=24)
    drawn = torch_pi2.generate(model, FEW, max_new_tokens=12, num_return_sequences=2, do_sample=True, seed=3)
    greedy = model.generate(FEW, max_new_tokens=12, do_sample=False)  # type: ignore[operator]
    assert first == f"{plain.sequences} {guessed.sequences} {drawn.sequences} {greedy.tolist()}\n"
    name, seconds = second.split()
    assert name == "through"
    assert float(seconds) < 5  # of a processor, of at least 8


def test_what_cannot_be_led_is_refused(folder: Path, tmp_path: Path) -> None:
    script = (
        """
before = Decoder(model, max_tokens=64)
"""
        + _LEAD
        + """
decoder = Decoder(model, max_tokens=64, compiled=False)
for wrong in (
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
):
    try:
        print("nothing was wrong", wrong())
    except torch_pi2.Pi2Error as error:
        print(type(error).__name__, error)
print(decoder.prompt(few).tolist())
leader.close()
"""
    )
    said, _ = together(tmp_path, _BEGIN + script, 2, folder / "2")
    old, twice, cache, backend, early, token, step, call, named, row, tokens, good = said.splitlines()
    assert old == (
        "ConfigError Decoder of a model that several processes compute: expected one that was made since "
        "torch_pi2.lead, found one from before, or a copy, which the other processes have not. Make it again."
    )
    assert twice == (
        "ConfigError lead(model): expected a model of shards, which several processes compute, and that none of them "
        "leads, found one that is led. Call it once, in all processes, after torch_pi2.load of a folder of shards."
    )
    assert cache == (
        "ConfigError model(...) of a model that several processes compute: expected numbers, text and tensors, which "
        "can be sent to the others, found a KeyValues. Leave it out; a Decoder keeps keys and values by itself."
    )
    assert backend.startswith("ConfigError Decoder(...) of a model that several processes compute: expected numbers")
    assert early.startswith("ShapeError decoding step: expected a prompt before it")
    assert token.startswith("ConfigError prompt: expected tokens of 0 to")
    assert step.startswith("ConfigError token: expected tokens of 0 to")
    assert call.startswith("ConfigError input_ids: expected tokens of 0 to")
    assert named.endswith("found the token -1. Use the tokenizer of this model.")
    assert row.startswith("ShapeError copy_kv: expected tokens, 1 or more, of a sequence that there is (now [5])")
    assert "found 0 to 6 of row 0" in tokens
    one = Decoder(torch_pi2.load(folder / "store", budget="1GiB"), max_tokens=64, compiled=False)
    assert good == str(one.prompt(FEW).tolist())
    with pytest.raises(ConfigError, match=r"lead\(model\): expected .* found one that this process computes alone"):
        torch_pi2.lead(tiny("llama-relu"))


def test_keys_and_values_that_are_divided_stay_where_they_are(folder: Path, tmp_path: Path) -> None:
    script = """
decoder = Decoder(model, max_tokens=64, batch=2, compiled=False)
for _ in decoder.add(asked):
    pass
try:
    list(decoder.add(asked, [[*decoder.copy_kv(0, 0, 8)]]))
except torch_pi2.Pi2Error as error:
    print(type(error).__name__, error)
parts = [decoder.copy_kv(0, 0, 8)]
del parts
list(decoder.add(asked, [decoder.copy_kv(0, 0, 9)]))
time.sleep(1.5)  # longer than between signs of life
decoder.step(torch.tensor([[1], [2]]))
part = decoder.copy_kv(0, 0, 9)
for wrong, ids in ((copy.copy(part), asked), (pickle.loads(pickle.dumps(part)), asked), (part, few)):
    try:
        decoder.retain([0])
        list(decoder.add(ids, [wrong]))
    except torch_pi2.Pi2Error as error:
        print(type(error).__name__, error)
leader.close()
"""
    watched = """
import copy, pickle
from torch_pi2.decode.lead import _Follower
make = _Follower.make
def noted(self, call):
    make(self, call)
    print(call.name, [self._parts[number][0].shape[1] for number in self._parts])
_Follower.make = noted
"""
    said, other = together(tmp_path, watched + _BEGIN + _LEAD + script, 2, folder / "float" / "stages")
    known, *copies, longer = said.splitlines()
    assert known.startswith(
        "UnsupportedModelError add(known=...) of a model whose keys and values are divided among processes: "
        "expected what copy_kv gave since torch_pi2.lead: every process has a part of it, found others."
    )
    assert copies == [known, known]  # the others have no parts of copies
    assert longer == (
        "ShapeError add(known=...): expected keys and values of the first tokens of the prompt, at most 5, found "
        "those of 9. Leave out what the prompt does not begin with."
    )
    kept_there = [line for line in other.splitlines() if line.startswith(("copy_kv_part", "step"))]
    # each is gone when the next one comes, or a sign of life
    assert kept_there == ["copy_kv_part [8]", "copy_kv_part [8]", "copy_kv_part [9]", "step []", "copy_kv_part [9]"]


def test_what_one_leader_had_the_next_one_has_not(folder: Path, tmp_path: Path) -> None:
    """Nor does it take something else for it."""
    script = """
leader = torch_pi2.lead(model)
if leader is not None:
    old = Decoder(model, max_tokens=64, batch=2, compiled=False)
    list(old.add(asked))
    part = old.copy_kv(0, 0, 9)
    leader.close()
leader = torch_pi2.lead(model)
if leader is None:
    sys.exit()
new = Decoder(model, max_tokens=64, batch=2, compiled=False)
list(new.add(asked))
for wrong in (lambda: old.prompt(few), lambda: list(new.add(asked, [part]))):
    try:
        print("nothing was wrong", wrong())
    except torch_pi2.Pi2Error as error:
        print(type(error).__name__, error)
print(new.step(torch.tensor([[3]])).tolist())
leader.close()
"""
    said, _ = together(tmp_path, _BEGIN + script, 2, folder / "float" / "stages")
    decoder, part, token = said.splitlines()
    assert decoder.startswith("ConfigError Decoder of a model that several processes compute: expected one that was")
    assert part.startswith("UnsupportedModelError add(known=...) of a model whose keys and values are divided")
    one = Decoder(torch_pi2.load(folder / "float" / "store", budget="1GiB"), max_tokens=64, compiled=False)
    list(one.add(ASKED))
    assert token == str(one.step(torch.tensor([[3]])).tolist())


def test_a_led_model_that_is_compiled_is_called_by_all(folder: Path, tmp_path: Path) -> None:
    """By itself, and within something else."""
    script = """
wanted = model(few).logits
print(torch.equal(torch.compile(model, backend="eager")(few).logits, wanted))
print(torch.equal(torch.compile(lambda ids: model(ids).logits + 1, backend="eager")(few), wanted + 1))
leader.close()
"""
    said, _ = together(tmp_path, _BEGIN + _LEAD + script, 2, folder / "2")
    assert said == "True\nTrue\n"


def test_who_is_killed_is_named(folder: Path, tmp_path: Path) -> None:
    """A follower, while there is nothing to do and within a call; and the leader."""
    script = """
try:
    leader = torch_pi2.lead(model)
    torch_pi2.generate(model, few, max_new_tokens=3)
    killed = int((out / f"pid-{int(sys.argv[5] != 'leader')}").read_text())
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
    leader = None if rank else leader.close()
sys.stdout.flush()
os._exit(0)
"""
    lost = "expected an answer of each within 3 s, found none of process {}. See what it says"
    for how, codes in (("idle", [0, -9]), ("busy", [0, -9]), ("leader", [-9, 0])):
        said = together(tmp_path / how, _BEGIN + script, 2, folder / "2", how, codes=codes)
        survivor = said[how == "leader"].splitlines()
        assert lost.format(int(how != "leader")) in survivor[-1], said
        assert survivor[-1].startswith("raised 2 processes that compute one model")
        if how == "idle":
            assert survivor[0] == "noticed True"


@pytest.mark.slow
@pytest.mark.parametrize("shards", ["2", "float/stages"])
def test_who_is_killed_is_named_by_a_graph_of_ours(folder: Path, tmp_path: Path, shards: str) -> None:
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
sys.stdout.flush()
os._exit(0)
"""
    said, _ = together(tmp_path, _BEGIN + script, 2, folder / shards, codes=[0, -9])
    assert "expected an answer of each within 3 s, found none of process 1. See what it says" in said


@pytest.mark.parametrize(
    ("shards", "led", "victim"), [("2", "", 0), ("2", "led", 1), ("float/stages", "led", 0), ("float/stages", "", 1)]
)
def test_who_is_stopped_within_a_prompt_goes_on_or_is_named(
    folder: Path, tmp_path: Path, shards: str, led: str, victim: int
) -> None:
    """By SIGSTOP, for less than ``timeout_s``, and for more."""
    script = """
import subprocess
led, victim, stops = sys.argv[5], int(sys.argv[6]), out / "stops"

def stop(*_):
    if stops.exists():
        seconds = stops.read_text()
        stops.unlink()
        subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)

if rank == victim:
    [m for m in model.modules() if hasattr(m, "store_layer")][-1].register_forward_hook(stop)
leader = torch_pi2.lead(model) if led and not rank else None
try:
    if led and rank:
        torch_pi2.lead(model)
    else:
        decoder = Decoder(model, max_tokens=64, chunk_tokens=8, compiled=False)
        for seconds in (1, 7):
            if rank == (0 if led else victim):
                stops.write_text(str(seconds))
            token = decoder.prompt(torch.arange(40)[None])
            print([int(token), int(decoder.step(token))])
except torch_pi2.errors.GroupError as error:
    print(error)
if leader is not None:
    leader.close()
sys.stdout.flush()
os._exit(0)
"""
    said = together(tmp_path, _BEGIN + script, 2, folder / shards, led, victim)
    store = folder / ("store" if shards == "2" else "float/store")
    decoder = Decoder(torch_pi2.load(store, budget="1GiB"), max_tokens=64, chunk_tokens=8, compiled=False)
    token = decoder.prompt(torch.arange(40)[None])
    wanted = str([int(token), int(decoder.step(token))])
    for rank, lines in enumerate(said):
        answers, errors = lines.splitlines()[:-1], lines.splitlines()[-1]
        assert answers == ([] if led and rank else [wanted])
        assert "compute one model" in errors
        lost = f"process {victim}. See" if rank != victim else "this one in time: all others have given up, as they do"
        assert f"expected an answer of each within 3 s, found none of {lost}" in errors


def test_a_call_that_ends_otherwise_elsewhere_ends_the_group(folder: Path, tmp_path: Path) -> None:
    """Of one that fails here alone nobody knows what the others have: not of the leader's hook, nor of a follower."""
    script = """
def wrong(*_):
    raise torch_pi2.errors.ConfigError("hook", expected="a", found="b", fix="c")

if rank == int(sys.argv[5]):
    model.register_forward_hook(wrong)
try:
    leader = torch_pi2.lead(model)
    for _ in range(2):
        try:
            model(few)
        except torch_pi2.errors.ConfigError as error:
            print(error)
except torch_pi2.errors.GroupError as error:
    print(error)
sys.stdout.flush()
os._exit(0)
"""
    for who, alone in ((0, "that it failed there alone"), (1, "that it was refused here alone: hook: expected a")):
        first, second = together(tmp_path / str(who), _BEGIN + script, 2, folder / "2", who)
        assert "call of process 0 in process 1: expected the same end of it in all processes, found " + alone in second
        assert "found none of process 1, which says: GroupError: call of process 0 in process 1" in first


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
leader.close()
"""
    first, second = together(tmp_path, _BEGIN + _LEAD + script, 2, folder / "2")
    model = torch_pi2.load(folder / "store", budget="1GiB")
    assert first == f"True {torch_pi2.generate(model, FEW, max_new_tokens=5).sequences}\n"
    assert second.startswith("through")


def test_what_is_sent_comes_as_it_was() -> None:
    tensors = [torch.randn(3, 4).bfloat16(), torch.zeros(2, 0), torch.tensor(7), torch.tensor([True, False])]
    call = Call("step", 3, [tensors, None, 1.5, "a\n", True, range(2)], {"x": tensors[0]}, True, [1, 2], True)
    found = _unpacked(_packed(call))
    assert (found.name, found.target, found.sparse, found.gone, found.raised) == ("step", 3, True, [1, 2], True)
    assert found.args[1:] == [None, 1.5, "a\n", True, [0, 1]]
    for one, other in zip([*found.args[0], found.kwargs["x"]], [*tensors, tensors[0]], strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one, other)
    with pytest.raises(ConfigError, match=r"step\(\.\.\.\) of a model .* found a set"):
        _packed(Call("step", 3, [{1}]))
