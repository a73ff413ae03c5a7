"""The report in a real browser: `make test-browser`. Needs Chromium and playwright."""

import os
import shutil
from pathlib import Path

import pytest

from tailrace.report.render import render

pytestmark = [pytest.mark.browser, pytest.mark.compiled]
WIDTHS, SCHEMES = (1280, 390), ("light", "dark")


@pytest.fixture(scope="module")
def page_file(loaded, played, tmp_path_factory):
    """A whole report; another one can be looked at with TAILRACE_REPORT=file.html."""
    if "TAILRACE_REPORT" in os.environ:
        return str(Path(os.environ["TAILRACE_REPORT"]).resolve())
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render(loaded, played, "tailrace report it"), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api")
    found = (
        os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    )
    if found is None:
        pytest.skip("there is no Chromium; name it with CHROMIUM=path")
    with api.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def opened(browser, page_file):
    """Opens the report: opened(width, scheme) -> page, what it asked for, what it complained of."""
    contexts = []

    def opened(width=1280, scheme="light", **options):
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, **options
        )
        contexts.append(context)
        page, asked, complaints = context.new_page(), [], []
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(f"file://{page_file}")
        return page, asked, complaints

    yield opened
    for context in contexts:
        context.close()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_loaded_wrong_or_too_wide(opened, page_file, width, scheme):
    page, asked, complaints = opened(width, scheme)
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    outside = page.evaluate(
        """[...document.querySelectorAll('main *, header *')].filter(e =>
           !e.closest('.box, pre, .skip, svg') && e.getClientRects().length &&
           e.getBoundingClientRect().right > innerWidth + 0.5).map(e => e.outerHTML.slice(0, 90))"""
    )
    assert outside == []
    assert [url for url in asked if not url.startswith("data:")] == [f"file://{page_file}"]
    assert complaints == []


@pytest.mark.parametrize("width", WIDTHS)
def test_words_of_plots_are_large_enough_and_within(opened, width):
    page, _, _ = opened(width)
    found = page.evaluate(
        """[...document.querySelectorAll('figure svg text')].filter(t => t.getClientRects().length)
           .map(t => {
             const a = t.getBoundingClientRect(), b = t.ownerSVGElement.getBoundingClientRect();
             const scale = b.width / t.ownerSVGElement.viewBox.baseVal.width;
             return [t.textContent, scale * parseFloat(getComputedStyle(t).fontSize),
                     a.left - b.left, b.right - a.right];
           })"""
    )
    assert found
    for text, size, left, right in found:
        assert size >= 8.5, text
        assert min(left, right) > -6, text


@pytest.mark.parametrize(
    ("scheme", "media"), [("light", "screen"), ("dark", "screen"), ("dark", "print")]
)
def test_words_can_be_told_from_their_ground(opened, scheme, media):
    """Contrast of at least 4.5 (WCAG AA) for every colour of text; paper is white."""
    page, _, _ = opened(scheme=scheme)
    page.emulate_media(media=media, color_scheme=scheme)
    found = page.evaluate(
        """() => {
          const channels = (c) => c.match(/[\\d.]+/g).map(Number);
          const light = (c) => channels(c).slice(0, 3).map(v => v / 255)
            .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
            .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
          const ground = (e) => {
            for (; e; e = e.parentElement) {
              const c = getComputedStyle(e).backgroundColor;
              if (c.startsWith('rgb(')) return c;
            }
            return 'rgb(255, 255, 255)';
          };
          const low = new Set();
          const words = 'p, li, dt, dd, th, td, a, summary, span, text';
          for (const e of document.querySelectorAll(words)) {
            if (!e.textContent.trim() || !e.getClientRects().length) continue;
            const style = getComputedStyle(e);
            const ink = e.tagName === 'text' ? style.fill : style.color;
            const [a, b] = [light(ink), light(ground(e))].sort((x, y) => y - x);
            if ((a + 0.05) / (b + 0.05) < 4.5) low.add(`${e.tagName} ${e.className} ${ink}`);
          }
          return [...low];
        }"""
    )
    assert found == []


def test_a_dot_says_what_it_is_to_mouse_and_keyboard(opened):
    page, _, _ = opened()
    dot = page.locator("figure svg .dot").first
    dot.scroll_into_view_if_needed()
    words = dot.get_attribute("data-tip")
    assert words
    dot.hover(force=True)
    assert page.locator("#tip.on").text_content()
    dot.focus()
    assert page.locator("#tip.on").text_content() == words


def test_paper(opened):
    """Nothing is cut off at the right edge of A4, and folds are open."""
    page, _, _ = opened(720)
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:not([open])").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 720
    assert len(page.pdf(format="A4")) > 10_000


def test_without_scripts(opened):
    page, _, _ = opened(java_script_enabled=False)
    assert page.locator("h1").is_visible()
    assert page.locator("figure svg title").count() > 10
    page.locator("summary").first.click()
    assert page.locator("details[open]").count() == 1
