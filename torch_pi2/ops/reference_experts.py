"""A name that messages of the C++ library have for :mod:`torch_pi2.ops.reference`."""

from torch_pi2.ops.reference import experts_ffn, stored_experts

__all__ = ["experts_ffn", "stored_experts"]
