"""What things are: sites, plans, statistics, settings. Nothing here does anything to a model."""
