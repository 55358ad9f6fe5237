"""Language models and their layer specs."""
