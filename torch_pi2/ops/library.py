"""Loads the C++ operators and gives them fake kernels. (bootstrapping: reference kernels until the core is built)"""
from __future__ import annotations
import torch
from torch_pi2.ops import reference
_loaded = False
_lib = None
def load() -> None:
    global _loaded, _lib
    if _loaded: return
    _loaded = True
    _lib = torch.library.Library("pi2", "DEF")
    _lib.define("sparse_ffn(Tensor x, Tensor bundles, Tensor? bias_gate, Tensor? bias_up, Tensor? bias_down, Tensor? active, str activation, bool activation_on_up, int n_hot, float threshold) -> Tensor")
    _lib.impl("sparse_ffn", reference.sparse_ffn, "CPU")
    _lib.define("predict_lowrank(Tensor x, Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? b_bias, float threshold) -> Tensor")
    _lib.impl("predict_lowrank", reference.predict_lowrank, "CPU")
    torch.library.register_fake("pi2::sparse_ffn", lambda x, *a: torch.empty_like(x), lib=_lib)
    torch.library.register_fake("pi2::predict_lowrank", lambda x, a, as_, b, *r: x.new_empty((*x.shape[:-1], b.shape[0]), dtype=torch.bool), lib=_lib)
