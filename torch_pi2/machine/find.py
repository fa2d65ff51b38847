"""A hardware profile by name: a preset, a file, or what was measured on this machine."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from torch_pi2.base.fields import checked
from torch_pi2.base.files import cache_folder
from torch_pi2.base.package import __version__
from torch_pi2.errors import ConfigError
from torch_pi2.machine import process as machine
from torch_pi2.machine.hardware import VERSION, Hardware
from torch_pi2.machine.presets import PRESETS, preset
from torch_pi2.machine.process import cores


def cached_path() -> Path:
    """Where what was measured on this machine with this version is kept."""
    about = machine.describe()["machine"]
    parts = (about["cpu"], cores(), about["kernels"], __version__, VERSION)
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]
    return cache_folder() / f"hardware-{key}.json"


@checked
def find_hardware(name: str | Path) -> Hardware:
    """``measured`` (this machine's, cached), a preset by name, or a file.

    Raises:
        ConfigError: this machine was not measured yet, or nothing has this name.
        ArtifactError: the file is damaged.
    """
    text = str(name)
    if text == "measured":
        path = cached_path()
        if not os.path.lexists(path):
            raise ConfigError(
                "hardware",
                expected=f"this machine's profile in {path}",
                found="none",
                fix="Measure it (about a minute): torch-pi2 doctor --measure.",
            )
        return Hardware.load(path)
    if text in PRESETS:
        return preset(text)
    if not os.path.lexists(text):
        raise ConfigError(
            "hardware",
            expected=f"measured, {', '.join(PRESETS)}, or a file of torch-pi2 doctor --measure",
            found=repr(text),
            fix="Name one of them; docs/HARDWARE.md says how to describe another machine.",
        )
    return Hardware.load(text)
