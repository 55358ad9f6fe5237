"""Memory, time and traffic of a layout, by arithmetic alone: nothing here imports torch."""
