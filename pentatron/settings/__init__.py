"""Declares, parses, derives and checks all settings of a run, and freezes them into one `RunConfig`."""
