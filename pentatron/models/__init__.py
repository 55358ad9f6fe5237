"""Models made of the layers of `nn`."""
