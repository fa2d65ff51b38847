"""Measuring this machine, and fitting its hardware profile."""
