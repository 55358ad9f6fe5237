"""Parts of scripts/record_outputs.py: recorded commands, their inputs, and comparison."""
