"""Settings: their declarations, files, command line and rules, and one frozen configuration."""
