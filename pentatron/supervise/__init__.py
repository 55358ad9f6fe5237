"""Starting worker processes, watching over them and starting them again."""
