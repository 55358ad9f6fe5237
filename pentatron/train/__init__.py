"""Building a run and going through its steps."""
