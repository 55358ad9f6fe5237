"""Starts worker processes, detects hangs, and restarts crashed jobs."""
