"""Estimates of memory, time and traffic of a layout. Does not import torch."""
