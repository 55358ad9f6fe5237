"""Shared by models."""
