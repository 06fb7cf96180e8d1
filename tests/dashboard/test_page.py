"""The page in a real Chromium without a screen: draws, follows, filters, survives its swarm, replays, asks nobody else.

Needs a Chromium: playwright's own (`playwright install chromium-headless-shell`), or one of the system.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from playwright.sync_api import Error as BrowserError

from spes_p2p.dashboard.follow import Follower
from spes_p2p.dashboard.history import History
from spes_p2p.dashboard.replay import replay
from tests.dashboard.conftest import served
from tests.dashboard.made_run import NOW, ROUND_SECONDS, WARNING, MadeSource
from tests.dashboard.test_history import filled
from tests.dashboard.test_replay import write_run

SYSTEM = [found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        own = Path(playwright.chromium.executable_path)
        path = str(own) if own.exists() else next(iter(SYSTEM), None)
        try:
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except BrowserError as error:
            pytest.skip(f"no Chromium can be started here: {str(error).splitlines()[0]}")
        yield browser
        browser.close()


class Watched:
    """A page, what it asked for from elsewhere, and what went wrong in it."""

    def __init__(self, browser: Browser, address: str, width: int = 1300, scheme: str = "light") -> None:
        self.context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme="dark" if scheme == "dark" else "light"
        )
        self.page: Page = self.context.new_page()
        self.elsewhere: list[str] = []
        self.wrong: list[str] = []
        self.page.on("request", lambda request: self._note(request.url, address))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("console", lambda said: self.wrong.append(said.text) if said.type == "error" else None)
        self.page.goto(address)

    def close(self) -> None:
        self.context.close()
        assert self.elsewhere == []
        assert self.wrong == []

    def _note(self, url: str, address: str) -> None:
        if not url.startswith((address, "data:", "blob:")):
            self.elsewhere.append(url)


def curves(page: Page, chart: str) -> int:
    return page.locator(f"#{chart} .scatterlayer .trace, #{chart} .barlayer .trace").count()


def test_it_draws_and_follows_and_filters_and_survives(browser: Browser) -> None:
    history = History()
    filled(history, 0, 24)
    follower, source = Follower(history), MadeSource()
    with served(history) as address:
        watched = Watched(browser, address)
        page = watched.page
        expect(page.locator("#run")).to_have_text("run made")
        expect(page.locator("#tiles .tile").first).to_contain_text("24")
        expect(page.locator("#loss .scatterlayer .trace")).to_have_count(2)
        expect(page.locator("#speed .scatterlayer .trace")).to_have_count(5)
        expect(page.locator("#experts .expert")).to_have_count(16)
        expect(page.locator("#experts .orphan")).to_have_count(1)
        expect(page.locator("#peers tbody tr")).to_have_count(5)
        expect(page.locator("#load .heatmaplayer .hm")).to_have_count(1)
        expect(page.locator("#load-words")).to_contain_text("round 24, told by 4 peers: most to expert 5 (3.")
        expect(page.locator("#load-hint")).to_contain_text("over the peers weighted with their tokens")
        expect(page.locator("#experts .load.hot")).to_have_count(1)
        expect(page.locator("#experts .load.dead")).to_have_count(0)
        page.locator("#load-part button[data-part=highest]").click()
        expect(page.locator("#load-hint")).to_contain_text("where it is most")
        expect(page.locator("#events")).to_contain_text(WARNING)  # with its angle brackets
        assert page.locator("#events b").count() == 0
        assert curves(page, "timeline") >= 5

        now = NOW + 25 * ROUND_SECONDS
        follower.apply(source.look_at(25, now, follower.known()), now)
        expect(page.locator("#tiles .tile").first).to_contain_text("25")

        page.fill("#peer-filter", "dora")
        expect(page.locator("#peers tbody tr")).to_have_count(1)
        expect(page.locator("#load .heatmaplayer .hm")).to_have_count(1)
        expect(page.locator("#speed .scatterlayer .trace")).to_have_count(2)
        page.fill("#peer-filter", "")
        page.locator("#loss-axis button[data-axis=at]").click()
        expect(page.locator("#loss-axis button[data-axis=at]")).to_have_attribute("aria-pressed", "true")
        page.locator("#peers th button", has_text="tokens/s").click()
        expect(page.locator("#peers tbody tr").first).to_contain_text("dora")

        follower.fail("no initial peer can be reached: 10.0.0.1 is refused", now + 5)
        expect(page.locator("#link")).to_have_text("no answer")
        expect(page.locator("#notice")).to_contain_text("10.0.0.1 is refused")
        expect(page.locator("#loss .scatterlayer .trace")).to_have_count(2)
        page.select_option("#event-filter", "connection")
        expect(page.locator("#events li")).to_have_count(1)
        page.reload()
        expect(page.locator("#tiles .tile").first).to_contain_text("25")
        watched.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_in_light_and_in_dark(browser: Browser, scheme: str) -> None:
    history = History()
    filled(history, 0, 20)
    with served(history) as address:
        watched = Watched(browser, address, width=360, scheme=scheme)
        expect(watched.page.locator("#loss .scatterlayer .trace")).to_have_count(2)
        assert watched.page.evaluate("document.documentElement.scrollWidth") == 360
        background = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]"
        assert (watched.page.evaluate(background) > 128) == (scheme == "light")
        watched.page.click("#theme")
        assert (watched.page.evaluate(background) > 128) == (scheme == "dark")
        watched.close()


def test_what_peers_say_is_only_ever_text(browser: Browser) -> None:
    """A record may hold any printable characters in its device and version."""
    history = History()
    filled(history, 0, 3)
    name, shown = next(iter(history.peers().items()))
    with history.writing():
        history.set_peer(name, {**shown, "device": "<img src=x onerror=alert(1)>", "version": "<script>1</script>"})
    with served(history) as address:
        watched = Watched(browser, address)
        expect(watched.page.locator("#peers")).to_contain_text("<img src=x onerror=alert(1)>")
        assert watched.page.locator("#peers img, #peers script").count() == 0
        watched.close()


def test_a_past_run_can_be_played(browser: Browser, tmp_path: Path) -> None:
    history = History()
    replay([write_run(tmp_path / "anna"), write_run(tmp_path / "ben", 9.0)], history)
    with served(history) as address:
        watched = Watched(browser, address)
        page = watched.page
        expect(page.locator("#run")).to_have_text("past run: anna, ben")
        expect(page.locator("#tiles .tile").first).to_contain_text("round12")
        expect(page.locator("#load-words")).to_contain_text("round 12, told by 2 peers")
        page.locator("#until").fill("300")
        expect(page.locator("#load-words")).not_to_contain_text("round 12")
        expect(page.locator("#tiles .tile").first).not_to_contain_text("round12")
        page.click("#play")
        expect(page.locator("#until")).not_to_have_value("300")  # the words beside it change by the minute
        watched.close()


def test_charts_of_next_to_nothing_have_no_fractions_on_their_axes(browser: Browser) -> None:
    history, source = History(), MadeSource()
    follower = Follower(history)
    follower.apply(source.look_at(0, NOW, follower.known()), NOW)
    with served(history) as address:
        watched = Watched(browser, address)
        for chart, axis, texts in (("bytes", "y", ["0"]), ("merge", "x", ["0"]), ("loss", "x", ["0"])):
            expect(watched.page.locator(f"#{chart} .{axis}tick")).to_have_text(texts)
        milliseconds = watched.page.locator("#speed .xtick", has_text=".")
        expect(watched.page.locator("#speed .xtick").first).to_be_visible()
        assert milliseconds.count() == 0
        watched.close()


def test_a_dead_expert_is_named(browser: Browser) -> None:
    history = History()
    filled(history, 0, 29)
    with served(history) as address:
        watched = Watched(browser, address)
        expect(watched.page.locator("#load-words.bad")).to_contain_text("nothing in any layer to 11")
        expect(watched.page.locator("#experts .load.dead")).to_have_text("0.0×")
        watched.close()
