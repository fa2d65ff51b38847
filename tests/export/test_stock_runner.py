"""ExecuTorch's own LLM runner, as it is in its wheel, runs the program of a bundle: the text of ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import ROOM, one_layer
from shared import shared_folder
from tiny_tokenizers import byte_tokenizer

import torch_pi2
from torch_pi2.export.executorch import load_library, set_options
from torch_pi2.export.run import Bundle

pytestmark = pytest.mark.slow

TEXT = "the five boxing wizards jump quickly over a lazy dog, and the dog sleeps on"
#: Of one call, fewer than what the longest prompt has.
PIECE = 8


def make(folder: Path) -> None:
    tokenizer = byte_tokenizer(TEXT)
    model = torch_pi2.optimize(one_layer(vocab_size=300, bos_token_id=0, eos_token_id=0))
    with torch.no_grad():  # of tokens that are a part of a character no text is made
        for token, piece in enumerate(tokenizer.convert_ids_to_tokens(range(300))):
            if token == 0 or not piece.replace("\u0120", "").isascii():
                model.get_input_embeddings().weight[token] = 0
    torch_pi2.export(model, folder, tokenizer=tokenizer, max_tokens=ROOM, max_prompt=PIECE, batches=(1,))


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    load_library()
    made = shared_folder(tmp_path_factory, "stock-runner", make)
    set_options({"store_path": str(made)})
    yield made
    set_options({"store_path": ""})


def said(runner: Any, prompt: str, count: int, **settings: Any) -> str:
    from executorch.extension.llm.runner import GenerationConfig

    pieces: list[str] = []
    how = GenerationConfig(max_new_tokens=count, temperature=0.0, echo=False, **settings)
    runner.generate(prompt, how, pieces.append, None)
    return "".join(pieces)


def test_it_says_what_a_bundle_says(folder: Path) -> None:
    from executorch.extension.llm.runner import TextLLMRunner

    runner = TextLLMRunner(str(folder / "model.pte"), str(folder / "tokenizer.json"))
    found = {}
    for prompt in ("the dog", "five wizards", TEXT[:30]):
        runner.reset()
        found[prompt] = said(runner, prompt, 12)
    with Bundle(folder) as bundle:
        for prompt, text in found.items():
            wanted = bundle.generate(prompt, 12)
            assert len(set(wanted.sequences[0].ids)) > 3
            assert text == wanted.text
        assert len(wanted.prompt_ids) > PIECE


def test_a_second_turn_goes_on_from_the_first(folder: Path) -> None:
    """Without ``reset`` keys and values stay."""
    from executorch.extension.llm.runner import TextLLMRunner

    runner = TextLLMRunner(str(folder / "model.pte"), str(folder / "tokenizer.json"))
    first = said(runner, "the dog", 5)
    second = said(runner, " jump", 5)
    with Bundle(folder) as bundle:
        whole = bundle.tokenizer("the dog").input_ids
        one = bundle.generate(whole, 5).sequences[0]
        assert first == one.text
        # what it chose last it has not read: as all runners it reads a token to choose the next
        more = bundle.tokenizer(" jump").input_ids
        two = [bundle.generate([*whole, *one.ids[:end], *more], 5).text for end in (4, 5)]
    assert second in two
