"""Benchmarks of parallel layouts: which layouts to try, how to run and measure them, tables and charts."""
