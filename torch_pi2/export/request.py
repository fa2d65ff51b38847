"""What an export is asked for, and what can be refused of it before anything is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_pi2.decode.executorch import check_executorch
from torch_pi2.errors import ArtifactError, ConfigError
from torch_pi2.export.choose import is_whole
from torch_pi2.export.manifest import BESIDE, MANIFEST_FILE, Manifest
from torch_pi2.types.config import HOT_ATTENTION, KV_FORMATS, LINEARS

#: As :class:`torch_pi2.export.qnn.Settings` has them.
_NPU_DEFAULTS = {
    "precision": "w4a16",
    "outliers": 64,
    "blocks": "auto",
    "quantization": "rtn",
    "weight_sharing": True,
}


@dataclass(frozen=True)
class Request:
    """What :func:`torch_pi2.export` was asked for; its arguments say what each is."""

    target: str
    max_tokens: int
    max_prompt: int
    batches: tuple[int, ...]
    linears: str
    kv: str
    hot: Mapping[int, int] | None
    hot_prompts: tuple[int, ...] | None
    hot_attention: str | None
    precision: str
    outliers: int
    blocks: int | str
    quantization: str
    weight_sharing: bool
    progress: bool

    @property
    def soc(self) -> str | None:
        return self.target.partition(":")[2] or None

    @property
    def splits(self) -> bool:
        """Whether layers have a hot part for an accelerator."""
        return self.soc is not None or self.hot is not None

    @property
    def prompt_tokens(self) -> int:
        """That one call of ``forward`` takes."""
        return min(self.max_prompt, self.max_tokens - 1)


def sorted_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(sorted({*sizes}))
    except TypeError:
        return tuple(sizes)  # refused by name


def check_request(request: Request) -> None:
    """What can be refused before anything is done."""
    prompts = request.hot_prompts or ()
    of_npu = [name for name, default in _NPU_DEFAULTS.items() if getattr(request, name) != default]
    for name, good, expected in (
        ("max_tokens", is_whole(request.max_tokens, 3), "a whole number, 3 or more"),
        ("max_prompt", is_whole(request.max_prompt, 2), "a whole number, 2 or more"),
        (
            "batches",
            bool(request.batches) and all(is_whole(batch, 1) for batch in request.batches),
            "batch sizes of 1 or more",
        ),
        ("linears", request.linears in LINEARS, ", ".join(LINEARS)),
        ("kv", request.kv in KV_FORMATS, ", ".join(KV_FORMATS)),
        *((name, request.soc is not None, "it left out where target is not an NPU's") for name in of_npu),
        (
            "hot_prompts",
            not prompts or (request.splits and all(is_whole(tokens, 2, request.max_tokens - 1) for tokens in prompts)),
            f"sizes of 2 to {request.max_tokens - 1} tokens, with hot or an NPU alone",
        ),
        (
            "hot_attention",
            request.hot_attention in (None, "none") or (request.hot_attention in HOT_ATTENTION and request.splits),
            f"{', '.join(HOT_ATTENTION)}; with hot or an NPU alone",
        ),
        ("hot", request.hot is None or not {*request.hot} - {*request.batches}, "chunks for sizes of batches alone"),
    ):
        if not good:
            found = repr(getattr(request, name))
            raise ConfigError(f"export({name}=...)", expected=expected, found=found, fix="Leave it out.")
    if request.hot_attention in ("prompts", "all") and request.kv == "int8":
        raise ConfigError(
            f"export(hot_attention={request.hot_attention!r}) with kv='int8'",
            expected="keys and values in float32 or float16: those in int8 have a scale for each token",
            found="int8",
            fix="Leave one of them out.",
        )
    kind, _, soc = request.target.partition(":")
    if request.target != "xnnpack" and (kind != "qnn" or not soc):
        raise ConfigError(
            "export(target=...)",
            expected="'xnnpack', or 'qnn:' and an SoC such as 'qnn:SM8650'",
            found=repr(request.target),
            fix="Choose one of them.",
        )
    check_executorch()
    if request.soc is not None:
        from torch_pi2.export import qnn

        qnn.check(qnn_settings(request))


def qnn_settings(request: Request) -> Any:
    from torch_pi2.export import qnn

    assert request.soc is not None
    return qnn.Settings(
        request.soc,
        request.precision,
        outliers=request.outliers,
        blocks=request.blocks,
        quantization=request.quantization,
        weight_sharing=request.weight_sharing,
    )


def check_bundle_folder(folder: Path) -> None:
    """Raises ArtifactError if ``folder`` holds anything but an earlier bundle: it is replaced as a whole."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    ours = {MANIFEST_FILE}
    if (folder / MANIFEST_FILE).is_file():
        with suppress(ArtifactError):  # somebody else's manifest.json
            ours |= Manifest.load(folder, verify=False).files.keys()
    if not folder.is_dir() or ours == {MANIFEST_FILE} or {path.name for path in folder.iterdir()} - ours - {*BESIDE}:
        raise ArtifactError(
            str(folder),
            expected="a new or empty folder, or an earlier bundle",
            found="other files" if folder.is_dir() else "a file",
            fix="Choose another folder.",
        )
