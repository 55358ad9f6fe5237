"""Text generation, and the models it can load."""
