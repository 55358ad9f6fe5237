"""Builds a run and trains it step by step: session, trainer, step, evaluation, saves and run folder."""
