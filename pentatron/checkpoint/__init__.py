"""Saving, finding, verifying and loading the state of a run."""
