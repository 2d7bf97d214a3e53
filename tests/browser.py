"""Where a Chromium is: `python tests/browser.py` prints its path, or ends with 1 where there is none."""

import os
import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def chromium() -> str | None:
    """LOWBIT_CHROMIUM, one of the system, or the one that `playwright install chromium` put there."""
    if path := os.environ.get("LOWBIT_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None):
        return path
    with sync_playwright() as p:
        return p.chromium.executable_path if Path(p.chromium.executable_path).is_file() else None


if __name__ == "__main__":
    print(found := chromium())
    sys.exit(found is None)
