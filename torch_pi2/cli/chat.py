"""Talk with a model in the terminal: answers as they come, with what was said before in mind.

/help says what else can be typed. Ctrl-C ends an answer, Ctrl-D the talk.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from typing import Any

from torch_pi2.cli import common
from torch_pi2.cli.output import OutputError, emit
from torch_pi2.cli.processes import process_group

EXAMPLE = "torch-pi2 chat my-sparse-model"

HELP = '''Type what you want to say. A line that ends with \\ goes on in the next; """ begins and ends several lines.
/stats         speed of the last answer, neurons computed, what was read of a store
/budget BYTES  memory of a packed store from now on, such as 2GB
/reset         forget what was said
/exit          leave (also Ctrl-D). Ctrl-C ends an answer. What begins with a space is no command.'''


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="DIR", help="folder written by optimize, quantize or pack, or a plain checkpoint")
    add("--system", metavar="TEXT", help="what the system says first")
    add("--max-new-tokens", type=common.positive, default=512, metavar="N", help="of an answer (default: 512)")
    add("--max-tokens", type=common.positive, metavar="N", help="of the talk (default: the model's, at most 4096)")
    add("--temperature", type=common.temperature, default=0.0, metavar="T", help="0 (default) is greedy")
    add(
        "--top-p", type=common.probability, default=1.0, metavar="P", help="of the most likely tokens (default: 1, all)"
    )
    add("--seed", type=common.seed, default=0, help="of the first answer; the next has this and 1 (default: 0)")
    common.add_decoding(parser)
    common.add_loading(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    with process_group(args, args.model) as (args.model,):
        return _run(args)


def _run(args: argparse.Namespace) -> dict[str, Any]:
    from torch_pi2.serve.chat import ChatSession

    sampling = common.sampling_of(args)
    args.context = args.max_tokens or common.MOST_TOKENS
    model = common.load_any(args)
    talk = ChatSession(
        model,
        common.load_tokenizer(args),
        max_tokens=common.max_tokens(args, model),
        limit=args.max_new_tokens,
        sampling=sampling,
        seed=args.seed,
        system=args.system,
        compiled=args.compile,
    )
    if not talk.template:
        _tell("this model's tokenizer has no chat template: it continues what you type")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # a line that is no text is refused, and the next one read
    with contextlib.suppress(EOFError):
        while True:
            said = _read(args)
            name, _, value = said.partition(" ")
            if name.lower() == "/exit":
                break
            if name.startswith("/"):
                _command(name.lower(), value.strip(), model, talk)
            elif said.strip():
                _answer(said, talk, args)
    return {"messages": talk.messages}


def _answer(said: str, talk: Any, args: argparse.Namespace) -> None:
    from torch_pi2.errors import Pi2Error

    try:
        for piece in talk.say(said):
            if not args.json:
                emit(args.stdout, piece)
    except Pi2Error as error:
        if isinstance(error, OutputError):
            raise
        _tell(error)
        return
    except KeyboardInterrupt:
        _tell("\nthe answer was ended here")
    if not args.json:
        emit(args.stdout, "\n")
    if talk.last is not None and talk.last.ended == "length":
        _tell(f"(cut after {talk.last.tokens} tokens: --max-new-tokens, or the talk is as long as it may be)")


def _read(args: argparse.Namespace) -> str:
    """What is typed next, of one line or several. Raises EOFError."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (input() then has lines to edit, and those before)
    lines: list[str] = []
    block = False
    while True:
        try:
            line = _line("... " if lines or block else "> ", args)
            line.encode()
        except UnicodeEncodeError:
            _tell("this line is not UTF-8: nothing of it was read")
            continue
        except KeyboardInterrupt:
            _tell("")
            lines, block = [], False
            continue
        except EOFError:
            if not lines:
                raise
            return "\n".join(lines)  # an open block: the next line is the end
        if line.strip() == '"""':
            if block:
                return "\n".join(lines)
            block = True
        elif block:
            lines.append(line)
        elif line.endswith("\\"):
            lines.append(line[:-1])
        else:
            return "\n".join([*lines, line])


def _line(prompt: str, args: argparse.Namespace) -> str:
    if sys.stdin is None:  # closed
        raise EOFError
    if not sys.stdin.isatty():
        return input()
    with contextlib.redirect_stdout(args.stdout):
        return input(prompt)


def _command(name: str, value: str, model: Any, talk: Any) -> None:
    import torch_pi2
    from torch_pi2.errors import Pi2Error

    if name == "/reset":
        talk.reset()
    elif name == "/stats":
        _tell(_stats(model, talk))
    elif name == "/budget" and value:
        try:
            torch_pi2.set_budget(model, value)
            _tell(f"the budget is {value} from now on")
        except Pi2Error as error:
            _tell(error)
    elif name == "/budget":
        _tell("how much, as in /budget 2GB")
    else:
        _tell(HELP if name == "/help" else f"{name} is not known\n{HELP}")


def _stats(model: Any, talk: Any) -> str:
    import torch_pi2
    from torch_pi2.eval.work import Work
    from torch_pi2.observe import counters
    from torch_pi2.rewrite.handle import store_of

    said = talk.last
    if said is None:
        return "nothing was answered yet"
    found = counters.read()
    share = Work(*(found[name] for name in ("neurons", "gate_rows", "up_rows", "down_rows", "dense_rows"))).rows_used
    lines = [
        f"{said.tokens} tokens, {said.tokens / max(said.seconds, 1e-9):.1f} a second ({said.ended})",
        f"{said.prompt_tokens} before them, of which {said.prompt_tokens - said.known} were read in "
        f"{said.prompt_seconds:.2f} s",
        "no sparse layer ran" if share is None else f"{common.percent(share)} of FFN rows used since the start",
    ]
    if store_of(model) is not None:
        lines.append(str(torch_pi2.stats(model)))
    return "\n".join(lines)


def _tell(what: object) -> None:
    print(what, file=sys.stderr, flush=True)


def render(result: dict[str, Any]) -> str:
    return ""
