"""What the guides call a healthy run, as shares of a step and of the time."""

MOST_COMMUNICATION = 0.20
LEAST_UTILISATION = 0.80
