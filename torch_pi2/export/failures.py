"""What torch, transformers and ExecuTorch raise about a model, as one named error with their reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch_pi2.errors import Pi2Error, UnsupportedModelError

#: About this machine, not about the model.
_OTHERS = (Pi2Error, OSError, MemoryError)


@contextmanager
def named_failures(what: str, expected: str) -> Iterator[None]:
    """Whatever is raised within is an UnsupportedModelError of ``what``, which says the reason in its first line."""
    try:
        yield
    except _OTHERS:
        raise
    except Exception as error:  # they raise many types; each carries its own explanation
        lines = str(error).strip().splitlines()
        raise UnsupportedModelError(
            what,
            expected=expected,
            found=f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__,
            fix="Export its dense form with torch.export and ExecuTorch to see whether torch_pi2 is the cause.",
        ) from error
