"""What happens while a model runs: traces, accesses, watching and drift."""
