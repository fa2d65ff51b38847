"""Finding the feed-forward layers of a model: capture, match, name."""

from torch_pi2.graph.capture import example_inputs
from torch_pi2.graph.find import find_sites
from torch_pi2.types.site import FFNSite, FFNWeights, LinearRef

__all__ = ["FFNSite", "FFNWeights", "LinearRef", "example_inputs", "find_sites"]
