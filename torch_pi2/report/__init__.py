"""One HTML file that shows what is known of a model folder: how neurons fire, the plan, its times, caches and I/O."""

from torch_pi2.report.collect import collect
from torch_pi2.report.facts import Report
from torch_pi2.report.page import write

__all__ = ["Report", "collect", "write"]
