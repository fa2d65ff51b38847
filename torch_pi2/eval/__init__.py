"""How good and how fast: held-out loss (:mod:`.loss`), work (:mod:`.work`), time (:mod:`.timing`), :mod:`.verdict`."""

from torch_pi2.eval.loss import LossReport, bits_per_byte, nats_per_token
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
    "DecodeComparison",
    "DecodeTiming",
    "LossReport",
    "Work",
    "bits_per_byte",
    "compare_decode",
    "ffn_modules",
    "judge",
    "nats_per_token",
    "time_decode",
    "time_decode_many",
    "work",
]
