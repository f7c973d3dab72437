"""The page of `perco ui` in a browser: Debian's chromium, without a screen."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The page of a store whose program runs."""
    store = tmp_path_factory.mktemp("ui") / "store"
    commands = [
        [sys.executable, "-m", "tests.acceptance.ui.app", str(store)],
        [sys.executable, "-m", "perco", "ui", str(store), "--listen", "127.0.0.1:0"],
    ]
    running = []
    try:
        for command in commands:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
            running.append(process)
            assert process.stdout is not None
            line = process.stdout.readline()
        yield line.partition(": ")[2].strip()
    finally:
        for process in reversed(running):
            process.terminate()
            process.wait(30)
            assert process.stdout is not None
            process.stdout.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, url: str) -> Iterator[Any]:
    """A tab that shows the page. What the page complains about fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    context.set_default_timeout(30_000)
    page = context.new_page()
    complaints: list[str] = []

    def said(message: Any) -> None:
        refused = "the server responded with a status of 400" in message.text  # a wrong question, which the page shows
        if message.type in ("error", "warning") and not refused:
            complaints.append(message.text)

    page.on("console", said)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(url)
    page.get_by_role("link", name="observer summarize").wait_for()
    yield page
    context.close()
    assert not complaints


expect = playwright.expect
expect.set_options(timeout=30_000)


def test_the_link_lets_in_and_the_token_leaves_the_address(page: Any, browser: Any, url: str) -> None:
    assert "token" not in page.url
    stranger = browser.new_context().new_page()
    assert stranger.goto(url.partition("?")[0]).status == 401
    stranger.context.close()


def test_the_pipeline_is_drawn_and_an_observer_has_a_panel(page: Any) -> None:
    graph = page.get_by_role("group", name=re.compile("The pipeline"))
    for text in "docs.text", "docs.lang", "words.seen", "summaries.summary":
        expect(graph.get_by_text(text, exact=True)).to_be_visible()
    expect(page.get_by_role("link", name=re.compile("^observer summarize: failed changes"))).to_be_visible()
    page.get_by_role("link", name=re.compile("^observer detect")).click()
    panel = page.get_by_role("complementary", name="observer detect")
    expect(panel.get_by_text("docs.lang")).to_be_visible()
    panel.get_by_role("button", name="Pause").click()
    page.get_by_role("dialog").get_by_role("button", name="Pause").click()
    expect(panel.get_by_role("button", name="Resume")).to_be_visible()
    expect(page.get_by_role("link", name=re.compile("^observer detect: paused"))).to_be_visible()
    panel.get_by_role("button", name="Resume").click()
    expect(panel.get_by_role("button", name="Pause")).to_be_visible()


def test_failed_changes_are_shown_and_replayed(page: Any) -> None:
    page.get_by_role("navigation", name="Views").get_by_role("link", name="Failed").click()
    expect(page.get_by_text("RuntimeError: the service answered <503>").first).to_be_visible()
    page.get_by_text("Traceback, and the chain").click()
    expect(page.get_by_text("Traceback (most recent call last)")).to_be_visible()
    page.get_by_role("button", name="Replay", exact=True).click()
    expect(page.get_by_role("status")).to_contain_text("1 change is waiting again")
    page.get_by_role("button", name="Refresh").click()
    expect(page.get_by_text("RuntimeError: the service answered <503>").first).to_be_visible()


def test_a_row_shows_its_versions_and_what_it_came_from(page: Any) -> None:
    page.keyboard.press("3")
    page.get_by_role("navigation", name="Tables").get_by_role("link", name="docs").click()
    expect(page.get_by_role("link", name="doc/bad")).to_be_visible()
    expect(page.get_by_text("<b>not markup</b>")).to_be_visible()  # as text
    page.get_by_role("link", name="doc/0").click()
    versions = page.get_by_role("region", name="text")
    expect(versions.get_by_text("two apples")).to_be_visible()
    expect(versions.get_by_text("an apple a day")).to_be_visible()
    page.get_by_role("button", name="Find causes").click()
    expect(page.get_by_text("a program's transaction").first).to_be_visible()
    expect(page.get_by_text("wrote this row").first).to_be_visible()


def test_rows_by_prefix_and_differences_of_two_moments(page: Any) -> None:
    page.keyboard.press("3")
    page.get_by_role("navigation", name="Tables").get_by_role("link", name="docs").click()
    page.keyboard.press("/")
    page.keyboard.type("doc/b")
    page.keyboard.press("Enter")
    expect(page.get_by_role("link", name="doc/bad")).to_be_visible()
    expect(page.get_by_role("link", name="doc/1")).to_have_count(0)
    page.get_by_label("as of").fill("yesterday")
    page.get_by_role("button", name="Show").click()
    expect(page.get_by_role("alert")).to_contain_text("yesterday")
    page.get_by_role("link", name="Differences").click()
    page.get_by_label("from").fill("1")
    page.get_by_role("button", name="Compare").click()
    expect(page.get_by_role("cell", name="two apples")).to_be_visible()


def test_tablets_and_activity_are_drawn(page: Any) -> None:
    page.keyboard.press("4")
    expect(page.get_by_role("img", name=re.compile("mutations a second"))).to_be_visible()
    expect(page.get_by_role("table", name="Tablets").get_by_role("row")).to_have_count(4)
    page.keyboard.press("5")
    expect(page.get_by_role("table", name="Processes that use the store").get_by_role("row")).to_have_count(2)
    expect(page.get_by_text("(owner)")).to_be_visible()


def test_everything_can_be_reached_with_the_keyboard(page: Any) -> None:
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog", name="Keys")).to_be_hidden()
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.getAttribute('aria-label') ?? ''").startswith("observer index"):
            break
    page.keyboard.press("Enter")
    expect(page.get_by_role("complementary", name="observer index")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("complementary")).to_have_count(0)
    page.keyboard.press("2")
    expect(page.get_by_role("main", name="Failed")).to_be_visible()


def contrast(page: Any, selector: str) -> float:
    """The contrast of a text to what is behind it, by WCAG."""
    return float(
        page.evaluate(
            """selector => {
              const light = text => {
                const [r, g, b] = text.match(/[\\d.]+/g).slice(0, 3).map(Number).map(v => v / 255)
                  .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
                return 0.2126 * r + 0.7152 * g + 0.0722 * b;
              };
              let element = document.querySelector(selector);
              const ink = light(getComputedStyle(element).color);
              const clear = element => /rgba\\(0, 0, 0, 0\\)/.test(getComputedStyle(element).backgroundColor);
              while (clear(element) && element.parentElement) element = element.parentElement;
              const back = light(getComputedStyle(element).backgroundColor);
              return (Math.max(ink, back) + 0.05) / (Math.min(ink, back) + 0.05);
            }""",
            selector,
        )
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_themes_can_be_read(page: Any, scheme: str) -> None:
    theme = "document.documentElement.dataset.theme"
    other = "light" if scheme == "dark" else "dark"
    for each in other, scheme:  # it follows the system
        page.emulate_media(color_scheme=each)
        page.locator(f"html[data-theme={each}]").wait_for()
    dark = page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--back').trim()")
    assert (dark == "#14171a") == (scheme == "dark")
    for selector in "nav a", ".strip dt", ".strip dd", ".grid td", ".grid th", ".grid a", "footer":
        assert contrast(page, selector) >= 4.5, selector
    page.keyboard.press("t")  # the other one, and it stays chosen
    page.reload()
    page.get_by_role("link", name="observer summarize").wait_for()
    for each in other, scheme:
        page.emulate_media(color_scheme=each)
        page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        assert page.evaluate(theme) == other
