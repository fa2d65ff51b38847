"""Text is generated: steps, keys and values, budgets."""
