"""Optimised models leave Python: :func:`torch_pi2.export` is :func:`torch_pi2.export.api.export` (docs/BUNDLE.md)."""
