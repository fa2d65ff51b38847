"""``torch_pi2.export.qnn``: the hot part of each layer for Qualcomm's NPU (Hexagon HTP), compiled ahead of time.

    settings = qnn.Settings(soc="SM8650")
    qnn.check(settings.soc)                              # before any work: SoC, versions, libraries; no network
    lowered = qnn.lower_hot(hot, samples, graphs, settings)

Qualcomm's libraries are proprietary (Qualcomm AI Stack License) and not part of torch_pi2; docs/QNN.md explains how to
get them. They compile in a separate process (:mod:`torch_pi2.export.qnn.compile`).
"""

from torch_pi2.export.qnn.lower import Lowered, check, lower_hot, lower_parts, problems
from torch_pi2.export.qnn.quantize import PartInputs, open_program, zeros
from torch_pi2.export.qnn.settings import MOST_BYTES, PART_BLOCK, PRECISIONS, SOCS, Graph, Settings
