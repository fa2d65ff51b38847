"""One HTML file that shows what is known of a model folder: how neurons fire, the plan, its times, caches and reads."""

from torch_pi2.report.collect import Report, collect
from torch_pi2.report.page import write

__all__ = ["Report", "collect", "write"]
