"""Torch-free arithmetic: ranks and axes, batch sizes, divisors, pipeline stages and schedules."""
