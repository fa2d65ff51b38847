"""Standard output, where the result goes; a result that cannot be written is an error."""

from __future__ import annotations

from typing import TextIO

from torch_pi2.errors import ArtifactError


class OutputError(ArtifactError):
    """Standard output cannot be written."""


def emit(file: TextIO | None, text: str) -> None:
    """Write ``text`` to standard output and flush. Raises OutputError, or BrokenPipeError: the reader has gone."""
    try:
        if file is None:
            raise OSError("it is closed")
        file.write(text)
        file.flush()
    except BrokenPipeError:
        raise
    except UnicodeEncodeError as error:
        raise OutputError(
            "standard output",
            expected="an encoding that has all characters of the result",
            found=f"{error.encoding} without {error.object[error.start]!a}",
            fix="Set PYTHONIOENCODING=utf-8, or use --json.",
        ) from error
    except OSError as error:
        raise OutputError(
            "standard output",
            expected="a file or terminal that takes the result",
            found=str(error.strerror or error),
            fix="Write it elsewhere.",
        ) from error
