"""Meshes, collectives and gradient buckets."""
