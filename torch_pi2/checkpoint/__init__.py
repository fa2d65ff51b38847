"""Folders on disk: saved, loaded, packed, quantised, synthetic."""
