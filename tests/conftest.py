"""Fixtures of the Python tests: one agent for each run of a suite."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from agent import Agent  # noqa: E402


@pytest.fixture(scope="session")
def agent():
    with Agent() as running:
        yield running
