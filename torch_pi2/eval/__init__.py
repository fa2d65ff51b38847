"""How good and how fast: held-out loss (:mod:`.loss`), work done (:mod:`.work`), decode timing (:mod:`.timing`)."""

from torch_pi2.eval.loss import LossReport, bits_per_byte, nats_per_token
from torch_pi2.eval.timing import (
    DecodeComparison,
    DecodeTiming,
    compare_decode,
    ffn_modules,
    time_decode,
    time_decode_many,
)
from torch_pi2.eval.work import Work, work

__all__ = [
    "DecodeComparison",
    "DecodeTiming",
    "LossReport",
    "Work",
    "bits_per_byte",
    "compare_decode",
    "ffn_modules",
    "nats_per_token",
    "time_decode",
    "time_decode_many",
    "work",
]
