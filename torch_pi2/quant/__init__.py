"""Quantising the weights of a model in memory: which layers, what their inputs look like, and what it costs."""
