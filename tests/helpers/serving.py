"""The trained example model, served on a port of its own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import openai
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import torch_pi2
from torch_pi2.cli.serve import _server
from torch_pi2.decode.decoder import Decoder
from torch_pi2.serve.app import application
from torch_pi2.serve.batch import Batch
from torch_pi2.serve.model import ServedModel

MODEL = Path(__file__).parents[2] / "examples" / "models" / "drelu-stdlib-5m"
TEMPLATE = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"


def dense() -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_pretrained(MODEL, trust_remote_code=True, dtype="float32").eval()
    return model


def quantised() -> nn.Module:
    return torch_pi2.optimize(dense(), weights="int4", activations="int8")


def tokenizer_of_example(template: str | None = TEMPLATE) -> Any:
    found = AutoTokenizer.from_pretrained(MODEL, trust_remote_code=True)
    found.chat_template = template
    return found


def greedy_alone(model: nn.Module, ids: Sequence[int], tokens: int, ends: Collection[int] = ()) -> list[int]:
    """What a server says after ``ids`` that nobody else asks: the last token of a prompt is fed by a step."""
    decoder = Decoder(model, max_tokens=len(ids) + tokens, compiled=False)
    for _ in decoder.add(torch.tensor([list(ids)])):
        pass
    found = [ids[-1]]
    while len(found) <= tokens and (len(found) == 1 or found[-1] not in ends):
        found.append(int(decoder.step(torch.tensor([[found[-1]]]))))
    return found[1:]


class Server:
    """``application`` with ``model``, called ``tiny``, and ``others``, in a thread."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        api_key: str | None = None,
        others: Mapping[str, nn.Module] | None = None,
        **settings: Any,
    ) -> None:
        models = {"tiny": model, **(others or {})}
        self._batches = {
            name: Batch(one, **{"max_tokens": 256, "max_batch_size": 4} | settings) for name, one in models.items()
        }
        self.batch = self._batches["tiny"]
        served = {name: ServedModel(name, one, tokenizer, self._batches[name]) for name, one in models.items()}
        app = application(served, api_key=api_key)
        self.model = model
        for batch in self._batches.values():
            batch.start()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._server = _server(app)
        self._server.capture_signals = nullcontext  # they are the main thread's
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]})
        self._thread.start()

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        for batch in self._batches.values():
            batch.close(0)
