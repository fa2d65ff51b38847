"""Every error a user can meet. Each message says what was expected, what was found, and what to do.

Each part is a keyword of the constructor, so that none is forgotten::

    raise ShapeError("hidden size of x", expected="4096 (the FFN's)", found="4095", fix="pass ...")
"""

from collections.abc import Collection


class Pi2Error(Exception):
    """Base of all torch_pi2 errors: ``what`` was wrong, what was ``expected``, ``found``, and the ``fix``."""

    def __init__(self, what: str, *, expected: str, found: str, fix: str) -> None:
        self.what, self.expected, self.found, self.fix = what, expected, found, fix
        super().__init__(f"{what}: expected {expected}, found {found}. {fix}")


def parse_core_error(message: str) -> tuple[str, str, str]:
    """What was wrong, expected and found in a message of the C++ core; the last with the fix, if there is one."""
    what, _, rest = message.partition(": expected ")
    expected, _, found = rest.partition(", found ")
    return what, expected, found


class GroupError(Pi2Error):
    """Another process of a group that computes one model has exited, hangs, or has failed."""


class NoFFNFoundError(Pi2Error):
    """The model has no feed-forward layer of a supported form; the message lists what it has."""


class UnsupportedModelError(Pi2Error):
    """The model, or one of its FFNs, has a form that torch_pi2 does not support; the message names it."""


class CalibrationError(Pi2Error):
    """Calibration data is missing, empty, too short, or of the wrong form."""


class NonFiniteError(Pi2Error):
    """NaN or infinity in weights or activations."""


class ShapeError(Pi2Error, ValueError):
    """A tensor has the wrong shape."""


class DtypeError(Pi2Error, TypeError):
    """A tensor has the wrong dtype, or dtypes are mixed."""


class DeviceError(Pi2Error):
    """A tensor or model is on a device that cannot be used (meta, or not the CPU)."""


class GradientError(Pi2Error):
    """The sparse operators are for inference: a gradient was asked for."""


class StaleArtifactError(Pi2Error):
    """An artefact (statistics, predictor, plan) was made from other weights: hashes do not match."""


class ArtifactError(Pi2Error):
    """A file of ours is missing, truncated, of another version, or cannot be written."""


class OutOfMemoryError(Pi2Error, MemoryError):
    """No memory for a call over a neuron store, or to open one. The store is undamaged; the next call may succeed.

    An operator without a store raises Python's own ``MemoryError`` instead.
    """


class LibraryMissingError(Pi2Error, ImportError):
    """The C++ library was not built or cannot be loaded."""


class ConfigError(Pi2Error, ValueError):
    """A setting or an argument has an invalid value."""


class VersionError(Pi2Error):
    """A library has a version that does not work with the others."""


class CompileError(Pi2Error):
    """An accelerator's compiler failed on a part of a model; the message has its reason."""


def check_made_from(what: str, found: str, wanted: str, expected: str, fix: str) -> None:
    """Raises StaleArtifactError unless ``what`` was made from FFN weights of hash ``wanted``; ``expected``: words
    before it.
    """
    if found != wanted:
        raise StaleArtifactError(what, expected=f"{expected} {wanted[:12]}", found=found[:12] or "none", fix=fix)


def check_choice(what: str, value: object, choices: Collection[str], fix: str) -> None:
    """Raises ConfigError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ConfigError(what, expected=" or ".join(choices), found=repr(value), fix=fix)


class BusyError(Pi2Error):
    """The queue of sequences to decode is full."""


class ClosedError(BusyError):
    """Nothing more is decoded: the server is shutting down."""
