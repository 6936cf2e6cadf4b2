"""The browser that tests of HTML pages use."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def open_page(file: Path, width: int, height: int) -> Iterator[Any]:
    """Open a file in Chromium: MEGAPIPE_BROWSER, or the first one on PATH. The page may load nothing else, and have no
    errors."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra `test`)")
    named = os.environ.get("MEGAPIPE_BROWSER")
    path = named or next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("no Chromium on PATH and MEGAPIPE_BROWSER is not set")
    errors: list[str] = []
    loaded: list[str] = []
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": height})
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: loaded.append(request.url))
        page.goto(file.as_uri())
        yield page
        browser.close()
    assert (errors, loaded) == ([], [file.as_uri()])
