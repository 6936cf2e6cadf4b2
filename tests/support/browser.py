"""The browser that tests of HTML pages use."""

import os
import shutil


def browser_path() -> str | None:
    """Return the path of a Chromium: MEGAPIPE_BROWSER, or the first one on PATH."""
    named = os.environ.get("MEGAPIPE_BROWSER")
    return named or next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
