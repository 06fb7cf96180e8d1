#!/usr/bin/env python3
"""Takes the pictures of docs/gallery.md: the dashboard of a real run, in a Chromium without a screen.

    python scripts/make_gallery.py            # needs the extras dashboard and dev, and a Chromium

The run is made for it, on this machine: a bootstrap node and three peers, processes of the installed program, train the
config `tiny` in rounds of 10 steps on the sources of the Python standard library. It takes some minutes.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Playwright, sync_playwright

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from spes_p2p.dashboard.history import History  # noqa: E402
from spes_p2p.dashboard.replay import replay  # noqa: E402
from spes_p2p.data.corpus import build_stdlib_corpus  # noqa: E402
from spes_p2p.data.tokenize import TokenizeOptions, tokenize  # noqa: E402
from spes_p2p.peer.kept_invite import kept_invite  # noqa: E402
from spes_p2p.quickstart.processes import LocalSwarm  # noqa: E402
from tests.dashboard.conftest import served  # noqa: E402

FOLDER = ROOT / "docs" / "gallery"
PEERS = ("anna", "ben", "cleo")
SHOTS = {"dashboard-light": (1280, "light"), "dashboard-dark": (1280, "dark"), "dashboard-phone": (390, "light")}
HEIGHT, WHOLE_HEIGHT = 850, 2230
"""The bar of a past run stands at the lower edge of the window, which is as high as the page there."""


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
    page.wait_for_timeout(3000)  # the last curves
    page.screenshot(path=str(FOLDER / f"{name}.png"), full_page=True)
    browser.close()


@contextmanager
def followed(invitation: str, folder: Path) -> Iterator[str]:
    """The address of the page while it follows the run."""
    command = [sys.executable, "-m", "spes_p2p.cli.main", "dashboard", invitation, "--port", "0"]
    with subprocess.Popen(
        [*command, "--database", folder / "page.sqlite"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield next(found[0] for line in process.stdout if (found := re.search(r"http://\S+", line)))
        finally:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=30, help="how many rounds there are to be seen")
    rounds = parser.parse_args().rounds
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        folder = Path(name)
        build_stdlib_corpus(folder / "corpus", 4_000_000)
        tokenize([str(folder / "corpus")], folder / "tokens", TokenizeOptions(tokenizer="byte"))
        with LocalSwarm(folder / "swarm") as swarm:
            swarm.bootstrap("tiny", folder / "tokens", ("sync.steps_per_round=10",))
            for peer in PEERS:
                swarm.peer(peer)
            swarm.wait_for_round(1, PEERS)
            with followed(kept_invite(swarm.folder / "bootstrap"), folder) as address:
                swarm.wait_for_round(rounds, PEERS, 1800.0)
                for shot, (width, scheme) in SHOTS.items():
                    take(playwright, address, shot, width, scheme)
        history = History()
        replay([folder / "swarm" / peer for peer in PEERS], history)
        with served(history) as address:
            take(playwright, address, "dashboard-replay", 1280, "light", WHOLE_HEIGHT)
    print(f"{FOLDER}: {len(SHOTS) + 1} pictures")


if __name__ == "__main__":
    main()
