"""Comparison of a layout with one process, and conversion of checkpoint steps to other layouts."""
