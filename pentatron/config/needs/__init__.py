"""What a setting needs from other settings to have an effect. Its declaration names the needs; see `setting`."""
