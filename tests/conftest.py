"""Hooks for the whole test suite."""

from tests.harness.client import session_zygote


def pytest_sessionfinish() -> None:
    session_zygote().close()
