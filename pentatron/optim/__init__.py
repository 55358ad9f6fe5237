"""Optimizers, update rules, learning rate schedules and loss scaling."""
