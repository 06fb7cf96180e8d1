#!/usr/bin/env python3
"""Takes the pictures of docs/gallery.md: the dashboard of a made-up run, in a Chromium without a screen.

    python scripts/make_gallery.py            # needs the extras dashboard and dev, and a Chromium

The run is that of the tests (`tests/dashboard/made_run.py`): its numbers are invented.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import Playwright, sync_playwright

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from spes_p2p.dashboard.follow import Follower  # noqa: E402
from spes_p2p.dashboard.history import History  # noqa: E402
from spes_p2p.dashboard.replay import replay  # noqa: E402
from tests.dashboard.conftest import served  # noqa: E402
from tests.dashboard.made_run import ROUND_SECONDS, MadeSource  # noqa: E402
from tests.dashboard.test_replay import write_run  # noqa: E402

FOLDER = ROOT / "docs" / "gallery"
ROUNDS = 38
SHOTS = {"dashboard-light": (1280, "light"), "dashboard-dark": (1280, "dark"), "dashboard-phone": (390, "light")}
HEIGHT, WHOLE_HEIGHT = 850, 2230
"""The bar of a past run stands at the lower edge of the window, which is as high as the page there."""


def made_run() -> History:
    """Up to this moment, so that the page takes it for a live one."""
    history, source = History(), MadeSource()
    follower, first = Follower(history), time.time() - (ROUNDS - 1) * ROUND_SECONDS
    for round in range(ROUNDS):
        now = first + round * ROUND_SECONDS
        follower.apply(source.look_at(round, now, follower.known()), now)
    return history


def past_run() -> History:
    history = History()
    with tempfile.TemporaryDirectory() as folder:
        replay([write_run(Path(folder) / "anna"), write_run(Path(folder) / "ben", 9.0)], history)
    return history


def take(playwright: Playwright, address: str, name: str, width: int, scheme: str, height: int = HEIGHT) -> None:
    """The whole page as a PNG."""
    own = Path(playwright.chromium.executable_path)
    path = str(own) if own.exists() else shutil.which("chromium")
    browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
    page = browser.new_page(
        viewport={"width": width, "height": height}, color_scheme="dark" if scheme == "dark" else "light"
    )
    page.goto(address)
    page.wait_for_selector("#timeline .main-svg")
    page.wait_for_timeout(1000)  # the last curves
    page.screenshot(path=str(FOLDER / f"{name}.png"), full_page=True)
    browser.close()


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        with served(made_run()) as address:
            for name, (width, scheme) in SHOTS.items():
                take(playwright, address, name, width, scheme)
        with served(past_run()) as address:
            take(playwright, address, "dashboard-replay", 1280, "light", WHOLE_HEIGHT)
    print(f"{FOLDER}: {len(SHOTS) + 1} pictures")


if __name__ == "__main__":
    main()
