"""What the page's words mean, shown where the pointer rests on them."""

from __future__ import annotations

import re
from html import escape

#: Word -> meaning; the plural has the same.
GLOSSARY = {
    "neuron": "A unit of a feed-forward layer: a row of gate and up, and a column of down. It is computed or skipped.",
    "cluster": "Neurons that are read from storage and kept in memory together.",
    "hot": "Computed for every token: these neurons fire so often that choosing would cost more than it saves.",
    "cold": "Computed for a token only when they are chosen: by the gate, or by a predictor.",
    "gate": "The part of a feed-forward layer that says how much of a neuron passes; at zero it can be skipped.",
    "bundle": "A model as a folder that ExecuTorch runs, on a phone or here.",
    "store": "The file model.pi2: every neuron in a slot that storage reads whole, with a checksum.",
    "plan": "Which neurons are hot in each layer, in what order they lie, and how cold ones are chosen.",
    "budget": "Bytes of memory for weights, cache, keys and values; neurons that do not fit are read from storage.",
    "recall": "Of the neurons that fire, the share that a predictor finds.",
}
_WORD = re.compile(rf"\b({'|'.join(GLOSSARY)})(s?)\b", re.IGNORECASE)


def marked(text: str) -> str:
    """HTML of ``text``, in which the first of each word of the glossary has its meaning."""
    seen: set[str] = set()

    def with_meaning(found: re.Match[str]) -> str:
        word = found[1].lower()
        if word in seen:
            return found[0]
        seen.add(word)
        return f'<abbr title="{escape(GLOSSARY[word])}">{found[0]}</abbr>'

    return _WORD.sub(with_meaning, escape(text))
