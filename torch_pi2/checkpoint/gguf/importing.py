"""``torch_pi2.import_gguf``: writes a GGUF file as a folder of ours, with its rows bit for bit where possible."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from torch_pi2.base.fields import checked
from torch_pi2.base.files import replacing_folder
from torch_pi2.base.modules import fresh_settings
from torch_pi2.checkpoint.card import keep_card
from torch_pi2.checkpoint.gguf.families import configuration
from torch_pi2.checkpoint.gguf.predictors import import_predictors
from torch_pi2.checkpoint.gguf.source import GgufCheckpoint
from torch_pi2.checkpoint.gguf.tokenizer import write_tokenizer
from torch_pi2.checkpoint.importing import ImportReport, write_imported
from torch_pi2.errors import UnsupportedModelError, check_choice
from torch_pi2.formats import IMPORT_NEURONS
from torch_pi2.ops import load as load_library
from torch_pi2.store.folder import check_replaceable
from torch_pi2.store.gguf import gguf_in


@checked
@fresh_settings()
def import_gguf(
    file: str | Path,
    folder: str | Path,
    *,
    neurons: str = "auto",
    predictors: Any = None,
    progress: bool = False,
) -> ImportReport:
    """Write the model of a GGUF file to ``folder``, for :func:`torch_pi2.load`, ``pack`` and the rest.

    Linear layers and the embedding keep the file's rows bit for bit if the type is Q4_0, Q8_0, Q4_1, Q5_0, Q5_1, Q4_K,
    Q5_K or Q6_K, and the same numbers if it is IQ4_NL. Other types are rounded again, to int4 if they have fewer than
    four bits a weight, else to int8, and the report lists them. Feed-forward layers are linear layers, too, unless they
    become neurons, which have a row of gate and up and a column of down together. Gate and up are then kept as well if
    they are Q4_0 to Q6_K (``int4+int8``, ``q4_k+int8``) or Q8_0 (``int8``); down is rounded again, to int8, except in
    PowerInfer's files, which store it neuron by neuron. If gate and up have no such type in common, they are rounded,
    too: to int8 if other layers keep theirs, else to int4 if the file has fewer than six bits a weight there, else to
    int8. Rows are read some at a time.

    Args:
        file: a GGUF file, any part of a model in several (``model-00001-of-00003.gguf``) with the others beside it, or
            a folder with one model.
        neurons: ``auto``: experts, and layers whose activation gives zeros (ReLU); none of other layers. ``all``: all
            layers, as a neuron store and thresholds need them; ``int4`` or ``int8``: all, in this format throughout
            (GPUs read no other; ``int4`` of a Q4_0 file is smaller, and rounds down by some 8 %).
            ``none``: none; experts are refused then.
        predictors: text (a str, a list of them, or token ids ``[N, T]``, some 2,000 tokens) on which the recall of a
            PowerInfer file's predictors is measured. They then decide which neurons are computed (lossy). None: they
            are ignored, and the exact gate, which misses nothing, decides.

    Raises:
        ArtifactError: damage, or ``folder`` cannot be written. UnsupportedModelError: an architecture, or something in
            it, that is not known; or predictors that ours cannot express (docs/GGUF.md). ConfigError: another
            ``neurons``. CalibrationError: too little text, or no tokenizer to read it with. LibraryMissingError: no
            transformers, or no gguf.
    """
    check_choice("import_gguf(neurons=...)", neurons, IMPORT_NEURONS, "Choose one of these.")
    load_library()
    file, folder = gguf_in(file) or Path(file), Path(folder).resolve()
    check_replaceable(folder)
    start = time.perf_counter()
    with GgufCheckpoint(file) as checkpoint, replacing_folder(folder) as staging:
        keep_card(folder, staging)
        _write_config(checkpoint, staging)
        tokenizer = write_tokenizer(checkpoint.file, staging)
        report = write_imported(checkpoint, staging, neurons, progress)
        report.tokenizer = tokenizer
        if predictors is None:
            report.predictors = len(checkpoint.predictors())
        else:
            report.recall = import_predictors(checkpoint, staging, predictors, progress)
    report.seconds = time.perf_counter() - start
    return report


def _write_config(checkpoint: GgufCheckpoint, folder: Path) -> None:
    from transformers import CONFIG_MAPPING, GenerationConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    values = configuration(checkpoint.file)
    try:
        config = CONFIG_MAPPING[values.pop("model_type")](**values)
    except Exception as error:  # its checks raise many types
        raise UnsupportedModelError(
            str(checkpoint.folder),
            expected=f"a configuration of {checkpoint.family.model_type}",
            found=" ".join(str(error).split())[:200],
            fix="The file is damaged, or transformers too old for it: pip install -U transformers.",
        ) from error
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
