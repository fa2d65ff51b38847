"""This machine is measured, and lines are fitted to it."""
