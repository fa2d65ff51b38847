"""Predictors: which cold neurons to compute, before computing them (data flow: ``predictors.safetensors``)."""
