"""Hugging Face folders: reading them, and what their names and settings are called here."""
