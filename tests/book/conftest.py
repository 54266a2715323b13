"""The headless Chromium of tests/browser, here for pages on the disk."""

from tests.browser.conftest import browser

__all__ = ["browser"]
