"""Feed-forward layers on a GPU: Triton kernels (:mod:`.kernels`) and the operator that launches them."""
