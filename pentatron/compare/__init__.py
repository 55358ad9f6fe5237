"""Layouts compared: with one process, and steps rewritten for another layout."""
