"""The tokenizer of a model: the one that was passed, or that of the folder which the model was loaded from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch_pi2.base.extras import missing_package
from torch_pi2.errors import ConfigError, Pi2Error
from torch_pi2.store.trust import trusted

#: Without one of these files transformers makes a tokenizer with an empty vocabulary.
_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def has_tokenizer(folder: Path) -> bool:
    """Whether ``folder`` has a tokenizer, by its file names."""
    return any((folder / file).is_file() for file in _FILES)


def tokenizer_of(model: Any, tokenizer: Any, what: str, error: type[Pi2Error] = ConfigError) -> Any:
    """``tokenizer``, or the one beside the weights of ``model`` if it is None. Nothing is downloaded.

    Args:
        what: the operation that needs a tokenizer, for messages.

    Raises:
        error: none was passed, and the folder of the model, if it has one, has none that can be loaded; or what
            was passed cannot read text. LibraryMissingError: it is to be loaded, without transformers.
    """
    if tokenizer is not None:
        if not callable(tokenizer) or not hasattr(tokenizer, "decode"):
            raise error(
                f"{what}: tokenizer",
                expected="a tokenizer: called with text it gives input_ids, and it has decode",
                found=f"a {type(tokenizer).__name__}",
                fix="Pass AutoTokenizer.from_pretrained(...).",
            )
        return tokenizer
    name = getattr(model, "name_or_path", None)
    folder = Path(name) if isinstance(name, str) and name else None
    if folder is None or not has_tokenizer(folder):
        raise _unknown(error, what, f"none, and none in {folder}" if folder else "none, and a model of no folder")
    try:
        from transformers import AutoTokenizer, PreTrainedConfig
    except ImportError as missing:
        raise missing_package("transformers", "hf", missing) from missing
    try:
        # with the model's configuration: reading the folder's without its code would cause a warning
        config = getattr(model, "config", None)
        known = {"config": config} if isinstance(config, PreTrainedConfig) else {}
        trust = trusted(folder, False)
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust, **known)
    except Exception as damage:  # transformers and tokenizers raise many types for damaged files
        reason = (str(damage).strip() or type(damage).__name__).splitlines()[0]
        raise _unknown(error, what, f"that of {folder}, which cannot be loaded: {reason[:200]}") from damage


def _unknown(error: type[Pi2Error], what: str, found: str) -> Pi2Error:
    fix = "Pass tokenizer=AutoTokenizer.from_pretrained(...), or token ids instead of text."
    return error(what, expected="a tokenizer to read text with", found=found, fix=fix)
