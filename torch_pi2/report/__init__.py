"""One HTML file about a model folder: how neurons fire, the plan, and its predicted times."""

from torch_pi2.report.collect import Report, collect
from torch_pi2.report.page import write

__all__ = ["Report", "collect", "write"]
