"""The operators ``torch.ops.pi2.*``: schemas and fakes (:mod:`.library`), and a readable reference of each. Importing
this registers and loads nothing; :func:`load` does, once, on first use.
"""

from torch_pi2.ops.activations import ACTIVATIONS
from torch_pi2.ops.library import load

__all__ = ["ACTIVATIONS", "load"]
