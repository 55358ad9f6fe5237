"""Data preparation and loading: tokenizers, indexed datasets, sample order, and batches of one rank."""
