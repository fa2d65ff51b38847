"""Observation of running models: traces, recorded accesses and their replay, counts of firing neurons."""
