"""The parity net: every layout against the same model on one process."""
