"""Chromium for the tests of the page."""

import os

import pytest
from playwright.sync_api import sync_playwright

# As root Chromium does not start its sandbox, and the page is our own. The rest keeps it from asking anybody on the
# network for anything.
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]


@pytest.fixture(scope="session")
def browser():
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=os.environ["CHROMIUM"], args=FLAGS)
        yield chromium
        chromium.close()
