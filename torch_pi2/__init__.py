"""torch_pi2: PowerInfer-2 for PyTorch. Feed-forward layers become predictor-gated neuron clusters.

    model = torch_pi2.optimize(model, calibration=text, tokenizer=tokenizer)

See README.md for a start, :mod:`torch_pi2.api` for the functions, :mod:`torch_pi2.errors` for what they raise.
Importing has no side effects: nothing is printed, downloaded, loaded or set, and torch is imported with the first name
that needs it.
"""

import importlib
import re
from pathlib import Path
from typing import Any

from torch_pi2.base.package import __version__ as __version__
from torch_pi2.errors import Pi2Error as Pi2Error

_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
#: Public name -> its module, as type checkers see it; each is imported when it is first used (PEP 562).
_MODULE_OF = {name: module for module, name in re.findall(r"^from (\S+) import (\w+) as \2$", _STUB, re.MULTILINE)}

__all__ = sorted(_MODULE_OF)

# A package is bound to its name when it is first imported: now, so that ``torch_pi2.export`` stays the function. What
# is in the package is imported by ``from torch_pi2.export... import ...``.
importlib.import_module("torch_pi2.export")
globals().pop("export", None)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
