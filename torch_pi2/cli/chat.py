"""Chat with a model in the terminal; answers are streamed.

/help lists the commands. Ctrl-C ends an answer, Ctrl-D the chat.
"""

import argparse
import contextlib
import io
import sys
from typing import Any

from torch_pi2.cli import common, models
from torch_pi2.cli.processes import process_group
from torch_pi2.cli.terminal import OutputError, emit
from torch_pi2.errors import Pi2Error

EXAMPLE = "torch-pi2 chat my-sparse-model"

HELP = """Type a message. A line that ends with \\ continues on the next one.
/stats  speed of the last answer, neurons computed, reads of a store
/reset  forget the conversation
/exit   leave (also Ctrl-D). Ctrl-C ends an answer. A line that begins with a space is no command."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help=common.RUNNABLE)
    add("--system", metavar="TEXT", help="the system message")
    common.add_sampling(parser, 512)
    add("--max-tokens", type=common.positive, help="tokens of the whole chat (default: the model's, at most 4096)")
    common.add_decoding(parser)
    common.add_drafting(parser)
    common.add_loading(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    with process_group(args, args.model) as (args.model,):
        return _run(args)


def _run(args: argparse.Namespace) -> dict[str, Any]:
    from torch_pi2.serve.chat import ChatSession

    sampling = common.sampling_of(args)
    args.context = args.max_tokens or common.MOST_TOKENS
    model = models.load_any(args)
    how: Any = {"limit": args.max_new_tokens, "seed": args.seed, "system": args.system, "compiled": args.compile}
    how |= {"kv": args.kv, **models.drafting(args)}
    tokenizer, tokens = models.load_tokenizer(args), common.max_tokens(args, model)
    session = ChatSession(model, tokenizer, max_tokens=tokens, sampling=sampling, **how)
    if not session.template:
        _tell("this model's tokenizer has no chat template: the model continues your text")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    with contextlib.suppress(EOFError):
        while True:
            text = _read(args)
            name = text.partition(" ")[0].lower()
            if name == "/exit":
                break
            if name == "/reset":
                session.reset()
            elif name == "/stats":
                _tell(_stats(model, session))
            elif name.startswith("/"):
                _tell(HELP if name == "/help" else f"{name} is not known\n{HELP}")
            elif not text.isprintable() and any("\udc80" <= letter <= "\udcff" for letter in text):
                _tell(f"expected UTF-8, found other bytes; this was not sent: {text.encode(errors='replace').decode()}")
            elif text.strip():
                _answer(text, session, args)
    return {"messages": session.messages}


def _answer(message: str, session: Any, args: argparse.Namespace) -> None:
    try:
        for piece in session.say(message):
            if not args.json:
                emit(args.stdout, piece)
    except OutputError:
        raise
    except Pi2Error as error:
        _tell(error)
        return
    except KeyboardInterrupt:
        _tell("\ninterrupted")
    if not args.json:
        emit(args.stdout, "\n")
    if session.last is not None and session.last.ended == "length":
        _tell(f"(cut after {session.last.tokens} tokens: --max-new-tokens, or --max-tokens of the whole chat)")


def _read(args: argparse.Namespace) -> str:
    """The next message: one line, or several joined by a final backslash. Raises EOFError."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (gives input() editing and history)
    lines: list[str] = []
    while True:
        try:
            if sys.stdin is None:  # closed
                raise EOFError
            if sys.stdin.isatty():
                with contextlib.redirect_stdout(args.stdout):
                    line = input("... " if lines else "> ")
            else:
                line = input()
        except KeyboardInterrupt:
            _tell("")
            lines = []
            continue
        except EOFError:
            if not lines:
                raise
            return "\n".join(lines)
        if not line.endswith("\\"):
            return "\n".join([*lines, line])
        lines.append(line[:-1])


def _stats(model: Any, session: Any) -> str:
    import torch_pi2
    from torch_pi2.eval.work import Work
    from torch_pi2.observe import counters
    from torch_pi2.rewrite.state import store_of

    last = session.last
    if last is None:
        return "no answer yet"
    found = counters.read()
    share = Work(*(found[name] for name in ("neurons", "gate_rows", "up_rows", "down_rows", "dense_rows"))).rows_used
    lines = [
        f"{last.tokens} tokens, {last.tokens / max(last.seconds, 1e-9):.1f} a second ({last.ended})",
        f"{last.prompt_tokens} before them, of which {last.prompt_tokens - last.known} were computed in "
        f"{last.prompt_seconds:.2f} s",
        *([] if session.drafts is None else [f"{common.drafts_of(vars(session.drafts))} since the start"]),
        "no sparse layer ran" if share is None else f"{common.percent(share)} of FFN rows used since the start",
    ]
    if store_of(model) is not None:
        lines.append(str(torch_pi2.stats(model)))
    return "\n".join(lines)


def _tell(what: object) -> None:
    print(what, file=sys.stderr, flush=True)


def render(result: dict[str, Any]) -> str:
    return ""
