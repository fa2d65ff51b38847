"""A name that messages of the C++ library have for :mod:`torch_pi2.ops.reference`."""

from torch_pi2.ops.reference import stored_ffn

__all__ = ["stored_ffn"]
