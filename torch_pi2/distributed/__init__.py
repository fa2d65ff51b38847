"""Several processes that compute one model together (docs/DISTRIBUTED.md)."""
