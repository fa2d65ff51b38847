"""``ExportSettings``: the settings of :func:`torch_pi2.export`, validated before any work."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch_pi2.base.fields import Field, argument, check_fields, limited
from torch_pi2.base.files import entries
from torch_pi2.errors import ArtifactError, ConfigError
from torch_pi2.export import qnn
from torch_pi2.export.manifest import MANIFEST_FILE, Manifest
from torch_pi2.types.config import HOT_ATTENTION, KV_FORMATS, LINEARS

#: Settings for an NPU only.
_OF_NPU = ("precision", "blocks", "quantization", "weight_sharing")
#: Settings for a decoder only.
_OF_DECODER = ("max_tokens", "max_prompt", "batches", "kv")


@dataclass(frozen=True)
class ExportSettings:
    """Keywords of :func:`torch_pi2.export`. Raises ConfigError: a setting or combination is invalid."""

    target: str = "xnnpack"
    max_tokens: int = limited(3, default=512)
    max_prompt: int = limited(2, default=256)
    batches: Sequence[int] = (1, 2, 4)
    linears: str = limited(choices=LINEARS, default="float32")
    kv: str = limited(choices=KV_FORMATS, default="float32")
    hot: Mapping[int, int] | None = None
    hot_prompts: Sequence[int] | None = None
    hot_attention: str | None = limited(choices=HOT_ATTENTION, default=None)
    precision: str = "w4a16"
    blocks: int | str = "auto"
    quantization: str = "rtn"
    weight_sharing: bool = True
    progress: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "export({}=...)")
        for name, least, most in (("batches", 1, 1 << 20), ("hot_prompts", 2, self.max_tokens - 1)):
            if (sizes := getattr(self, name)) is not None:
                wholes = [item.whole(least, most) for item in argument(sizes, f"export({name}=...)").items()]
                object.__setattr__(self, name, tuple(sorted({*wholes})))
        _check(self)

    @property
    def soc(self) -> str | None:
        """The SoC, such as SM8650; None without an NPU."""
        return self.target.partition(":")[2] or None

    @property
    def splits(self) -> bool:
        """Whether layers have a hot part for an accelerator."""
        return self.soc is not None or self.hot is not None

    @property
    def forward_tokens(self) -> int:
        """Most tokens per call of ``forward``."""
        return min(self.max_prompt, self.max_tokens - 1)

    @property
    def qnn(self) -> Any:
        assert self.soc is not None
        of_npu: dict[str, Any] = {name: getattr(self, name) for name in _OF_NPU}
        return qnn.Settings(self.soc, **of_npu)

    def changed(self, names: Sequence[str] = _OF_DECODER) -> list[str]:
        """Those of ``names`` without their default values."""
        defaults = {field.name: field.default for field in fields(self)}
        return [name for name in names if getattr(self, name) != defaults[name]]


def _check(settings: ExportSettings) -> None:
    on_accelerator = settings.hot_attention == "prompts"
    target_known = settings.target == "xnnpack" or (settings.target.startswith("qnn:") and settings.soc is not None)
    for name, good, expected in (
        ("target", target_known, "'xnnpack', or 'qnn:SM8650' and the like"),
        ("batches", bool(settings.batches), "batch sizes of 1 or more"),
        *((name, settings.soc is not None, "the default, as target is no NPU") for name in settings.changed(_OF_NPU)),
        ("hot_prompts", not settings.hot_prompts or settings.splits, "it only with hot or an NPU"),
        ("hot_attention", not on_accelerator or settings.splits, "it only with hot or an NPU"),
        ("hot_attention", not on_accelerator or settings.kv != "int8", "it only with kv in float32 or float16"),
        ("hot", not {*(settings.hot or {})} - {*settings.batches}, "chunks for the batch sizes in batches"),
    ):
        if not good:
            found = repr(getattr(settings, name))
            raise ConfigError(f"export({name}=...)", expected=expected, found=found, fix="Leave it out, or correct it.")


def check_bundle_folder(folder: Path) -> None:
    """Raises ArtifactError if ``folder``, which will be replaced, holds anything but an earlier bundle."""
    if not folder.exists() or (folder.is_dir() and not entries(folder)):
        return
    ours = {MANIFEST_FILE}
    if (folder / MANIFEST_FILE).is_file():
        with suppress(ArtifactError):  # another program's manifest.json
            ours |= Manifest.load(folder, verify=False).files.keys()
    if not folder.is_dir() or ours == {MANIFEST_FILE} or {path.name for path in entries(folder)} - ours:
        found = "other files" if folder.is_dir() else "a file"
        Field(folder, str(folder), "Choose another folder.").wrong("a new or empty folder, or an earlier bundle", found)
