"""Settings: one table, and the way from presets, files and flags to a checked configuration."""
