"""Modelling code that the user has allowed to run, remembered by its hash; and the tokenizer of a model.

transformers runs a checkpoint's Python files only with ``trust_remote_code=True``. Folders written from such a
checkpoint have copies of them. Since anything *in* a folder could be forged, hashes of allowed code are kept in the
user's cache. They are recorded by :func:`torch_pi2.save` for code that already runs, and by ``quantize`` and ``pack``
with ``trust_remote_code=True``. A hash covers folders with a ``pi2/`` and exactly these Python files; any change needs
consent again.
"""

import hashlib
import re
from pathlib import Path
from typing import Any

from torch_pi2.base.files import cache_folder
from torch_pi2.base.package import needed
from torch_pi2.base.progress import log
from torch_pi2.base.reading import parse, read_bytes
from torch_pi2.errors import ArtifactError, ConfigError, Pi2Error

#: Files that name the classes for transformers to run.
_NAMING = ("config.json", "tokenizer_config.json")
#: ``file.Class`` of the same folder, not of another one or a repository.
_CLASS = re.compile(r"([A-Za-z_]\w*)\.[A-Za-z_]\w*", re.ASCII)


def record_path() -> Path:
    """The file with one hash per line; deleting it withdraws all consent."""
    return cache_folder() / "trusted-code.txt"


def trusted(folder: str | Path, asked: bool) -> bool:
    """Whether code in ``folder`` may run: ``asked`` (``trust_remote_code``) is true, or its hash is recorded."""
    if asked:
        return True
    folder = Path(folder)
    try:
        if not (folder / "pi2").is_dir() or not _names_only_its_own(folder):
            return False
        found = _hash(folder)
        return found is not None and found in record_path().read_text().split()
    except (OSError, UnicodeDecodeError, ArtifactError):  # ArtifactError: also without a home directory
        return False


def remember(folder: Path) -> None:
    """Record that the user allowed the code in ``folder``, if there is any."""
    try:
        found = _hash(folder)
        path = folder if found is None else record_path()
        if found is None or (path.exists() and found in path.read_text().split()):
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as out:
            out.write(f"{found}\n")
    except (OSError, UnicodeDecodeError, ArtifactError) as error:
        log.warning("%s: its code is not remembered, pass trust_remote_code=True to load it (%s)", folder, error)


def how_to_trust(folder: str | Path) -> str:
    """Advice for when the code of ``folder`` may be needed."""
    known = "" if not (Path(folder) / "pi2").is_dir() else " It is not the code of a model that was made here."
    return f"Pass trust_remote_code=True if the checkpoint brings its own code and you have read it.{known}"


def _hash(folder: Path) -> str | None:
    """Hash of the names and bytes of all Python files in ``folder``; None: there are none."""
    files = sorted((path.relative_to(folder).as_posix(), path) for path in folder.rglob("*.py"))
    digest = hashlib.sha256()
    for name, path in files:
        digest.update(f"{name}\0{hashlib.sha256(read_bytes(path)).hexdigest()}\n".encode())
    return digest.hexdigest() if files else None


def _names_only_its_own(folder: Path) -> bool:
    """Whether transformers would run only code in ``folder``."""
    if (folder / "adapter_config.json").exists():  # names another model, which would be trusted too
        return False
    for file in _NAMING:
        path = folder / file
        about: Any = parse(read_bytes(path), path, unique=False) if path.is_file() else {}
        named = about.get("auto_map") if isinstance(about, dict) else None
        if named is None:
            continue
        if not isinstance(named, dict):
            return False
        for classes in named.values():
            for name in classes if isinstance(classes, list) else [classes]:
                found = _CLASS.fullmatch(name) if isinstance(name, str) else None
                if name is not None and (found is None or not (folder / f"{found[1]}.py").is_file()):
                    return False
    return True


#: Without any of these files, transformers makes a tokenizer with an empty vocabulary.
_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def has_tokenizer(folder: Path) -> bool:
    """Whether ``folder`` has a tokenizer, by its file names."""
    return any((folder / file).is_file() for file in _FILES)


def tokenizer_of(model: Any, tokenizer: Any, what: str, error: type[Pi2Error] = ConfigError) -> Any:
    """``tokenizer``, or if None the one beside the weights of ``model``; ``what`` needs it, for messages.

    Nothing is downloaded. Raises ``error`` if there is none that can be loaded, or it cannot read text, and
    LibraryMissingError without transformers.
    """
    if tokenizer is not None:
        if not callable(tokenizer) or not hasattr(tokenizer, "decode"):
            expected = "a tokenizer: called with text it gives input_ids, and it has decode"
            fix = "Pass AutoTokenizer.from_pretrained(...)."
            raise error(f"{what}: tokenizer", expected=expected, found=f"a {type(tokenizer).__name__}", fix=fix)
        return tokenizer
    name = getattr(model, "name_or_path", None)
    folder = Path(name) if isinstance(name, str) and name else None
    if folder is None or not has_tokenizer(folder):
        raise _unknown(error, what, f"none, and none in {folder}" if folder else "none, and a model of no folder")
    with needed("transformers", "hf"):
        from transformers import AutoTokenizer, PreTrainedConfig
    try:
        # with the model's configuration, since reading the folder's without its code would cause a warning
        config = getattr(model, "config", None)
        known = {"config": config} if isinstance(config, PreTrainedConfig) else {}
        trust = trusted(folder, False)
        found = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust, **known)
        try_out(found)
        return found
    except BaseException as damage:  # transformers and tokenizers raise many types for damaged files
        if not is_failure(damage):
            raise
        reason = (str(damage).strip() or type(damage).__name__).splitlines()[0]
        raise _unknown(error, what, f"that of {folder}, which cannot be loaded: {reason[:200]}") from damage


def try_out(tokenizer: Any, ours: bool = False) -> None:
    """Raises what ``tokenizer`` raises for some damage; warns of what libraries miss. ``ours``: ids are positions."""
    tokenizer("a")
    words = tokenizer.get_vocab() if getattr(tokenizer, "is_fast", False) and not ours else {}
    if len(of_id := {number: word for word, number in words.items()}) < len(words):
        word, number = next((word, number) for word, number in words.items() if of_id[number] != word)
        about = tokenizer.name_or_path, word, of_id[number], number
        log.warning("the tokenizer of %s has two words, %r and %r, of one id, %d: one of them is never decoded", *about)


def is_failure(error: BaseException) -> bool:
    """Whether ``error`` is an ``Exception``, or the panic of a Rust library (tokenizers), which is none."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _unknown(error: type[Pi2Error], what: str, found: str) -> Pi2Error:
    fix = "Pass tokenizer=AutoTokenizer.from_pretrained(...), or token ids instead of text."
    return error(what, expected="a tokenizer to read text with", found=found, fix=fix)
