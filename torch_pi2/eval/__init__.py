"""Quality and speed: held-out loss (:mod:`.loss`), tasks of lm-eval (:mod:`.harness`), :mod:`.work`, :mod:`.timing`."""

from torch_pi2.eval.loss import LossReport, bits_per_byte, nats_per_token
from torch_pi2.eval.timing import DecodeTiming, ffn_modules, time_decode
from torch_pi2.eval.verdict import judge
from torch_pi2.eval.work import Work, work

__all__ = [
    "DecodeTiming",
    "LossReport",
    "Work",
    "bits_per_byte",
    "ffn_modules",
    "judge",
    "nats_per_token",
    "time_decode",
    "work",
]
