"""Pipeline schedules: they are lists of actions here (pentatron.layout.schedules), which an executor runs."""

from pentatron.parallel.executor import Executor

__all__ = ["Executor"]
