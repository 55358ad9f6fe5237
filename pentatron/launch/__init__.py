"""Starting worker processes."""
