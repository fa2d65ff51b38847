"""Hardware profiles by name: measured on this machine, from a file, or a phone described in a paper.

Published profiles are not our measurements; ``notes`` has the source or the assumption behind each figure.
"""

import hashlib
import json
import os
from pathlib import Path

from torch_pi2.base.fields import argument, checked
from torch_pi2.base.files import cache_folder
from torch_pi2.base.package import __version__
from torch_pi2.machine import process
from torch_pi2.machine.hardware import VERSION, Hardware

#: Profiles that come with the package, by name: files that ``python -m benchmarks.published`` writes.
PRESETS = {path.stem: path for path in (Path(__file__).parent / "profiles").glob("*.json")}


def cached_path() -> Path:
    """Cache file of this machine's profile, for this version of the package."""
    about = process.describe()["machine"]
    parts = (about["cpu"], process.cores(), about["kernels"], __version__, VERSION)
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]
    return cache_folder() / f"hardware-{key}.json"


@checked
def find_hardware(name: str | Path) -> Hardware:
    """``measured`` (this machine's, cached), a preset by name, or a file. Raises ConfigError: this machine was not
    measured yet, or the name is unknown. ArtifactError: the file is damaged.
    """
    text = str(name)
    if text == "measured":
        path = cached_path()
        if not os.path.lexists(path):
            fix = "Measure it (about a minute): torch-pi2 doctor --measure."
            argument(name, "hardware", fix).wrong(f"this machine's profile in {path}", "none")
        return Hardware.load(path)
    if text not in PRESETS and not os.path.lexists(text):
        argument(name, "hardware", "Name one of them; docs/HARDWARE.md says how to describe another machine.").wrong(
            f"measured, {', '.join(PRESETS)}, or a file of torch-pi2 doctor --measure", repr(text)
        )
    return Hardware.load(PRESETS.get(text, text))
