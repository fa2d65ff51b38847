"""Sparse layers are put in a model's place of dense ones, and taken out again."""
