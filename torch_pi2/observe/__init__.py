"""What happens while a model runs: traces, recorded accesses and their replay, counts of what fires."""
