"""Continuing texts, and the models it is done with."""
