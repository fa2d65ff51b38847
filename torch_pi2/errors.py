"""Every error a user can meet. Each message says what was expected, what was found, and what to do.

Each part is a keyword of the constructor, so that none is forgotten::

    raise ShapeError("hidden size of x", expected="4096 (the FFN's)", found="4095", fix="pass ...")
"""

from __future__ import annotations

from collections.abc import Collection


class Pi2Error(Exception):
    """Base of all torch_pi2 errors: ``what`` was wrong, what was ``expected``, ``found``, and the ``fix``."""

    def __init__(self, what: str, *, expected: str, found: str, fix: str) -> None:
        self.what, self.expected, self.found, self.fix = what, expected, found, fix
        super().__init__(f"{what}: expected {expected}, found {found}. {fix}")


def told(message: str) -> tuple[str, str, str]:
    """What a message of the C++ core says was wrong, expected and found; the last with the fix, if it has one."""
    what, _, rest = message.partition(": expected ")
    expected, _, found = rest.partition(", found ")
    return what, expected, found


class GroupError(Pi2Error):
    """Another process of a group that computes one model has ended, hangs, or has failed."""


class NoFFNFoundError(Pi2Error):
    """No feed-forward layer of a supported form was found; the message lists what was seen."""


class UnsupportedModelError(Pi2Error):
    """The model (or one of its FFNs) has a form that torch_pi2 refuses, by name."""


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
    """There is no memory for a call over a neuron store, or for opening one; the store is sound, and the next may work.

    Where an operator has no memory and no store, it is Python's own ``MemoryError``.
    """


class LibraryMissingError(Pi2Error, ImportError):
    """The C++ library was not built or cannot be loaded."""


class ConfigError(Pi2Error, ValueError):
    """A setting has a value that makes no sense."""


class VersionError(Pi2Error):
    """A library has another version than the one that works together with the rest."""


class CompileError(Pi2Error):
    """An accelerator's compiler could not compile a part of a model; the message has its reason."""


def check_made_from(what: str, found: str, wanted: str, expected: str, fix: str) -> None:
    """Raises StaleArtifactError unless ``what`` was made from the FFN weights of hash ``wanted``.

    Args:
        expected: in words, before the hash.
    """
    if found != wanted:
        raise StaleArtifactError(what, expected=f"{expected} {wanted[:12]}", found=found[:12], fix=fix)


def check_choice(what: str, value: object, choices: Collection[str], fix: str) -> None:
    """Raises ConfigError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ConfigError(what, expected=" or ".join(choices), found=repr(value), fix=fix)


class BusyError(Pi2Error):
    """As many sequences wait to be decoded as may."""


class ClosedError(BusyError):
    """Nothing more is decoded: the server ends."""
