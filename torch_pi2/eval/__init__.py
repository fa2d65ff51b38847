"""Quality and speed: held-out loss (:mod:`.loss`), questions (:mod:`.suite`), :mod:`.work`, :mod:`.timing`."""

from torch_pi2.eval.loss import LossReport, bits_per_byte, nats_per_token
from torch_pi2.eval.suite import Answer, Difference, Item, answers, differences, make_items
from torch_pi2.eval.timing import (
    DecodeComparison,
    DecodeTiming,
    compare_decode,
    ffn_modules,
    time_decode,
    time_decode_many,
)
from torch_pi2.eval.verdict import judge
from torch_pi2.eval.work import Work, work

__all__ = [
    "Answer",
    "DecodeComparison",
    "DecodeTiming",
    "Difference",
    "Item",
    "LossReport",
    "Work",
    "answers",
    "bits_per_byte",
    "compare_decode",
    "differences",
    "ffn_modules",
    "judge",
    "make_items",
    "nats_per_token",
    "time_decode",
    "time_decode_many",
    "work",
]
