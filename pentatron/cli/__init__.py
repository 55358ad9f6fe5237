"""The command line: the only place that reads the environment and prints to the terminal by itself."""
