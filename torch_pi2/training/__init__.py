"""Continued training that makes a dense model's FFNs sparse (``torch_pi2.sparsify``); Hugging Face's Trainer trains."""
