"""Data types and their files: sites, plans, statistics, settings. Nothing here changes a model."""
