"""From text to batches: tokenizers, `.bin/.idx` files, samples in a fixed order, and the loader of one
rank.
"""
