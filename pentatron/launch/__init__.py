"""Jobs on several machines: job scripts, environment variables, and checks of a machine."""
