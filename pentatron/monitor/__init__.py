"""What a run tells about itself: metrics, log, progress, pictures."""
