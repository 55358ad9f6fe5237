"""Measuring layouts against each other: which there are, what each run shows, tables and pictures."""
