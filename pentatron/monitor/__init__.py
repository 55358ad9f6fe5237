"""Metrics, logs and progress display of a run."""
