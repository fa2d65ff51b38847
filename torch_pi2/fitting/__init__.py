"""Predictors are trained, calibrated and sized."""
