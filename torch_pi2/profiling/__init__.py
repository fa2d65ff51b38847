"""Profiling: which neurons fire, how often, and together with which others (data flow: ``stats.safetensors``)."""
