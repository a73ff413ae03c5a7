"""The live page in a real browser: `make test-browser`. Needs Chromium and playwright.

TAILRACE_SHOTS=folder keeps pictures of what was tested.
"""

import math
import os
import random
import shutil
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import orjson
import pytest

from router.observed import Observed
from tailrace.router.observe import status
from tailrace.router.observe.snapshot import WaitingSnapshot

pytestmark = pytest.mark.browser

WIDTHS, SCHEMES = (1280, 390), ("light", "dark")
HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "</script><script>document.title='owned'</script>",
    "\u202egnp.exe" + "W" * 300,
    "__proto__",
)


class Served:
    """The page and a router's status on a port of this machine, until it is closed."""

    def __init__(self, observed, token=None, port=0):
        pages = {"/status": status.describe, "/status/history": status.history}
        self.asked = []
        lock = self.lock = threading.Lock()
        asked = self.asked

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                asked.append(self.path)
                if self.path == "/":
                    self.answer(200, status.PAGE, status.PAGE_TYPE.decode(), status.PAGE_HEADERS)
                elif token and self.headers.get("authorization") != f"Bearer {token}":
                    self.answer(401, b"{}", "application/json")
                elif self.path in pages:
                    with lock:
                        page = pages[self.path](observed.telemetry, observed.snapshot())
                    self.answer(200, orjson.dumps(page), "application/json")
                else:
                    self.answer(404, b"{}", "application/json")

            def answer(self, code, body, kind, extra=b""):
                self.send_response(code)
                for line in extra.decode().split("\r\n"):
                    if line:
                        self.send_header(*line.split(": ", 1))
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(body)))
                self.send_header("connection", "close")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def close(self):
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


def autopilot(candidate="tailrace", **given):
    """What an autopilot says whose candidate has its turns."""
    turns = {
        "cycles": 7, "effect": -0.083, "low": -0.19, "high": 0.02, "better": 6.4, "worse": 1.0,
        "alpha": 0.05, "margin": 0.0,
    }  # fmt: skip
    steps = [
        (5000, f"{candidate} is 9% cheaper, as simulated: it shadows", {"simulated_gain": 0.09}),
        (4700, f"{candidate} has its first turns", {"shadowed": 5980}),
        (20, f"{candidate} has turns", turns),
    ]
    return {
        "mode": "act", "at": time.time() - 20, "says": steps[-1][1], "stage": "canary",
        "present": "", "candidate": candidate, "twin_error": -0.041, "vetoed": [],
        "wanted": {"replicas": 5, "low": 4, "high": 6},
        "steps": [{"at": time.time() - at, "what": w, "evidence": e} for at, w, e in steps],
        **given,
    }  # fmt: skip


def busy(names=None, seed=0, **routing):
    """A router after five minutes of traffic that swells, with a burst at one replica."""
    names = names or [f"a100-{i}.rack{i // 3 + 1}" for i in range(6)]
    observed = Observed(names, shadow="lookahead", canary="lmetric", canary_share=0.05, **routing)
    rng, t, n = random.Random(seed), observed.telemetry, len(names)
    observed.set(n - 1, speed=0.6)
    reasons = (
        "more of the prompt cached (1792 against 0 tokens)",
        "shorter queue (512 against 3104 tokens)",
        "earlier first token predicted (0.12 against 0.48 s)",
        "as good as the next, chosen at random",
    )
    for step in range(150):
        swell = 10 + 6 * math.sin(step / 25) + 2 * rng.random()
        for r in range(n):
            burst = 22 * math.exp(-(((step - 105) / 9) ** 2)) if r == 2 else 0
            in_flight = max(
                0, round(swell * (0.5 if r == n - 1 else 1) + rng.gauss(0, 1.2) + burst)
            )
            queued = round(in_flight * (0.12 + 0.5 * (burst > 6)))
            observed.set(r, in_flight=in_flight, queued=queued)
        for _ in range(round(3 * swell)):
            r = rng.randrange(n)
            other = (r + rng.randrange(1, n)) % n if n > 1 else -1
            scores = [rng.uniform(1, 4) for _ in range(n)]
            scores[r] = 0.2 + rng.random() / 2
            observed.decide(
                r, other, scores, rng.choice(reasons), cached=rng.choice((0, 0, 1792)),
                ttft_s=rng.uniform(0.05, 0.6), took_s=rng.uniform(2e-5, 6e-5),
                fell_back=rng.choice((None,) * 12 + ("guard", "range")),
                shadow=r if rng.random() < 0.9 else other,
            )  # fmt: skip
            ttft_s = rng.lognormvariate(-1.6, 0.6)
            attempt = observed.attempt(r, ttft_s=ttft_s, e2e_s=ttft_s + rng.lognormvariate(1, 0.7))
            t.request_done(attempt, 200, "done", "chat")
        observed.passes(2.0)
    for r in range(n):
        observed.set(
            r, running=9 + r, waiting=float(r % 3), kv_used=(0.35 + 0.1 * r) % 1.0,
            metrics_age_s=0.4, cached_tokens=2 * rng.randrange(60_000, 190_000),
        )  # fmt: skip
    t.retried(0, "connect")
    t.shed("queue")
    t.lagged(0.004)
    made = t.decisions.total()
    observed.state |= {"decisions": made, "canary_decisions": made // 20, "clients": 214}
    observed.state["autopilot"] = autopilot()
    observed.state["vetoed"] = ("random",)
    observed.clock.now += 0.4
    return observed


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
def serve():
    """Serves a router: serve(observed) -> Served."""
    made = []

    def serve(observed, **options):
        made.append(Served(observed, **options))
        return made[-1]

    yield serve
    for served in made:
        served.close()


@pytest.fixture
def opened(browser, serve, request):
    """Opens the page: opened(served, width, scheme) -> page, what it complained of."""
    contexts, pages = [], []

    def opened(served, width=1280, scheme="light", **options):
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, **options
        )
        context.set_default_timeout(15_000)
        contexts.append(context)
        page, complaints = context.new_page(), []
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda r: complaints.append(r.url) if not ours(r.url) else None)

        def ours(url):
            return url.startswith((served.url, "data:"))

        page.goto(served.url)
        pages.append(page)
        return page, complaints

    yield opened
    folder = os.environ.get("TAILRACE_SHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        name = "".join(c if c.isalnum() else "-" for c in request.node.name).strip("-")
        for i, page in enumerate(pages):
            page.screenshot(
                path=f"{folder}/{name}{f'-{i}' if i else ''}.png", full_page=True, timeout=60_000
            )
    for context in contexts:
        context.close()


def expect(locator):
    """Wait for something; the page's own security policy forbids functions given as text."""
    from playwright.sync_api import expect as expect_within

    expect_within.set_options(timeout=15_000)
    return expect_within(locator)


def words(page, selector):
    """The text of an element, with plain blanks."""
    return page.locator(selector).text_content().replace("\xa0", " ")


def is_live(page):
    page.wait_for_selector("#link.live")


def outside(page):
    """Elements that stick out of the window on the right, or whose text is cut."""
    return page.evaluate(
        """[...document.querySelectorAll('main *, header *')].filter(e =>
           !e.closest('svg, .name, .url, thead, [hidden]') && e.getClientRects().length &&
           (e.getBoundingClientRect().right > innerWidth + 0.5 ||
            (e.clientWidth && e.scrollWidth > e.clientWidth + 1 &&
             getComputedStyle(e).overflowX !== 'visible')))
           .map(e => e.outerHTML.slice(0, 90))"""
    )


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", [*WIDTHS, 820])
def test_everything_is_there_and_nothing_too_wide(opened, serve, width, scheme):
    observed = busy()
    page, complaints = opened(serve(observed), width, scheme)
    is_live(page)
    assert page.locator("h1").text_content() == "All 6 replicas take requests"
    assert page.locator("#replicas tr").count() == 6
    assert page.locator("#recent tr").count() == 12
    assert "a100-5.rack2" in page.locator("#replicas").text_content()
    assert "fallback rule" in page.locator("#events").text_content()
    assert page.locator("#trials").is_visible()
    assert page.locator("#autopilot-steps li").count() == 3
    said = words(page, "#autopilot")
    effect = "\u22128.3 % (\u221219 % to +2.0 %) after 7 cycles"
    for part in ("tailrace has turns", effect, "6.4 of 20", "off by 4.1 %", "wanted 5 (4 to 6)",
                 "vetoed random"):  # fmt: skip
        assert part in said
    line = page.locator("#replicas .flow-line").first.get_attribute("d")
    assert line.count("L") > 140  # the past is there at once, not only since the page was opened
    assert words(page, "#period") == "Last 5 minutes"
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert outside(page) == []
    assert complaints == []


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("gone", [False, True])
def test_words_can_be_told_from_their_ground(opened, serve, scheme, gone):
    """Contrast of at least 4.5 (WCAG AA) for every colour of text."""
    observed = busy()
    observed.breaks(1)
    observed.set(3, state="draining", available=False, draining=True)
    observed.state["waiting"] = 1
    served = serve(observed)
    page, _ = opened(served, scheme=scheme)
    is_live(page)
    if gone:
        served.close()
        page.wait_for_selector("#gone:not([hidden])")
    low = page.evaluate(
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
          for (const e of document.querySelectorAll('body *:not(svg *)')) {
            const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
            if (!own || !e.getClientRects().length || e.tagName === 'SCRIPT') continue;
            const [a, b] = [light(getComputedStyle(e).color), light(ground(e))]
              .sort((x, y) => y - x);
            if ((a + 0.05) / (b + 0.05) < 4.5) low.add(`${e.tagName} ${e.className}`);
          }
          return [...low];
        }"""
    )
    assert low == []


@pytest.mark.parametrize("width", WIDTHS)
def test_a_replica_dies_and_returns(opened, serve, width):
    observed = busy()
    served = serve(observed)
    page, complaints = opened(served, width)
    is_live(page)
    with served.lock:
        observed.breaks(2, "connection refused")
        observed.set(2, in_flight=0, queued=0, metrics_age_s=9.4)
        observed.clock.now += 9
    page.wait_for_selector("#replicas tr.out")
    assert page.locator("h1").text_content() == "5 of 6 replicas take requests"
    assert "out: connection refused" in words(page, "#replicas tr.out")
    assert "9 s old" in words(page, "#replicas tr.out")
    assert page.title().startswith("5/6")
    with served.lock:
        observed.set(2, state="closed", breaker="closed", available=True, why="")
    expect(page.locator("#replicas tr.out")).to_have_count(0)
    assert page.locator("h1").text_content() == "All 6 replicas take requests"
    with served.lock:
        observed.removed(2)
    expect(page.locator("#replicas tr")).to_have_count(5)
    assert complaints == []


@pytest.mark.parametrize("width", WIDTHS)
def test_it_says_so_when_the_router_is_gone(opened, serve, width):
    observed = busy()
    served = serve(observed)
    page, _ = opened(served, width)
    is_live(page)
    assert page.locator("#gone").is_hidden()
    served.close()
    page.wait_for_selector("#gone:not([hidden])")
    assert page.locator("#gone").get_attribute("role") == "alert"
    assert "connection refused" in page.locator("#gone").text_content()
    assert page.locator("h1").text_content() == "The router does not answer"
    assert page.locator("#link").text_content() == "✕ No answer"
    assert "no answer" in page.title()
    if width > 1000:
        return
    again = serve(busy(seed=1), port=served.port)  # it is back, as a new process
    is_live(page)
    assert page.locator("#gone").is_hidden()
    assert "/status/history" in again.asked


def test_a_router_that_was_never_there(opened, serve):
    observed = busy()
    served = serve(observed)
    page, _ = opened(served)
    page.route("**/status", lambda route: route.fulfill(status=500, body="{}"))
    page.reload()
    page.wait_for_selector("#gone:not([hidden])")
    assert "status 500" in page.locator("#gone").text_content()
    assert page.locator("#all").is_hidden()


@pytest.mark.parametrize("width", WIDTHS)
def test_hostile_names_are_only_text(opened, serve, width):
    observed = busy(HOSTILE)
    observed.breaks(0, "<b>why</b>")
    observed.state["autopilot"] = autopilot(HOSTILE[0], says=HOSTILE[1], present=HOSTILE[2])
    observed.decide(1, 0, reason="<svg onload=alert(2)>", fell_back="constructor", shadow=2)
    page, complaints = opened(serve(observed), width)
    is_live(page)
    text = page.locator("#replicas").text_content()
    assert all(name in text for name in HOSTILE)
    assert "<svg onload=alert(2)>" in page.locator("#recent").text_content()
    assert HOSTILE[0] in page.locator("#autopilot").text_content()
    assert page.locator("#all img, #all script, #all b:not(.facts b)").count() == 0
    assert "owned" not in page.title()
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert outside(page) == []
    assert complaints == []


@pytest.mark.parametrize("little", [{"mode": "suggest"}, {"steps": None, "wanted": None}, {}])
def test_an_autopilot_that_has_said_little(opened, serve, little):
    observed = busy()
    observed.state["autopilot"] = little
    observed.state["vetoed"] = ()
    page, complaints = opened(serve(observed))
    is_live(page)
    assert words(page, "#autopilot-says") == "has just begun"
    assert page.locator("#autopilot-steps").is_hidden()
    assert complaints == []


def test_the_token_is_asked_for_and_never_stored(opened, serve):
    served = serve(busy(), token="sesame")
    page, _ = opened(served)
    page.wait_for_selector("#ask:not([hidden])")
    assert page.locator("#all").is_hidden()
    page.fill("#token", "wrong")
    page.click("#ask button")
    expect(page.locator("#ask-why")).to_have_text("That is not the token.")
    page.fill("#token", "sesame")
    page.keyboard.press("Enter")
    is_live(page)
    assert page.locator("#ask").is_hidden()
    stored = page.evaluate(
        "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])"
    )
    assert "sesame" not in stored + page.url
    assert not any("sesame" in path for path in served.asked)


def test_a_fresh_router_has_nothing_to_show_and_says_so(opened, serve):
    page, complaints = opened(serve(Observed(("only",))))
    is_live(page)
    assert page.locator("h1").text_content() == "The one replica takes requests"
    assert page.locator("#no-decisions").is_visible()
    assert words(page, "#period") == "Last minute"
    assert "none in the last 5 minutes" in page.locator("#ttft-note").text_content()
    assert "NaN" not in page.locator("body").inner_text()
    assert "undefined" not in page.locator("body").inner_text()
    assert complaints == []


def test_decisions_hold_still_and_more_are_shown(opened, serve):
    observed = busy()
    served = serve(observed)
    page, _ = opened(served)
    is_live(page)
    page.click("#more")
    assert page.locator("#recent tr").count() == 50
    page.locator("#recent details summary").first.click()
    assert page.locator("#recent details[open] li").count() == 6
    page.click("#pause")
    before = page.locator("#recent").text_content()
    with served.lock:
        observed.decide(0, 1, reason="the newest of all")
    seen = len(served.asked)
    while len(served.asked) < seen + 2:
        page.wait_for_timeout(50)
    assert page.locator("#recent").text_content() == before
    page.click("#pause")
    expect(page.locator("#recent")).to_contain_text("the newest of all")


def test_a_draining_router_and_waiting_requests(opened, serve):
    observed = busy()
    oldest = WaitingSnapshot(client="team <a>", priority=0, waited_s=2.5, overtaken=3)
    observed.state |= {"draining": True, "waiting": 17, "oldest": (oldest,)}
    observed.decide(0, 1, waited_s=0.5, overtook=2, overtook_why="order", overtaken=1)
    page, _ = opened(serve(observed))
    is_live(page)
    assert page.locator("#closing").is_visible()
    assert (
        "17 more queued at the router, longest 2.50" in page.locator("#flight-note").text_content()
    )
    queue = page.locator("#queue-text").text_content()
    assert "client \u2068team <a>\u2069, priority 0: 3 that came later went first" in queue
    assert "and 16 more" in queue
    latest = page.locator("#recent tr").first.text_content()
    assert "sent before 2 that came earlier (the policy's order); 1 that came later" in latest


def test_many_replicas(opened, serve):
    page, complaints = opened(serve(busy([f"replica-{i}" for i in range(128)])))
    is_live(page)
    assert page.locator("#replicas tr").count() == 128
    assert complaints == []


def test_without_scripts(opened, serve):
    page, _ = opened(serve(busy()), java_script_enabled=False)
    assert page.locator("noscript").is_visible()
