"""The console in a real browser: every view with data of a running server, both schemes, all its actions, hostile data.

Optional: with playwright and Chromium (`pip install '.[browser]'`, `apt-get install chromium`), and axe for accessibility.
"""

from __future__ import annotations

import json
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.console.demo import RATES, ZOO, loaded, served

from tests.gateway.deploy.admin_fixture import zipped

pytest.importorskip("playwright")
from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome") or ""
pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.skipif(not CHROMIUM, reason="no Chromium")]

VIEWS = [
    *("", "functions", "functions/resnet50", "functions/describe_album", "calls", "refusals", "runs", "runs/new/describe_album"),
    *("plan", "apps", "apps/zoo", "access/tenants", "access/tokens", "access/users", "access/secrets", "access/bills"),
    *("access/audit", "playground/resnet50", "cluster", "nowhere"),
]
RULES = (
    "document.addEventListener('securitypolicyviolation',e=>(window.violations??=[]).push(e.violatedDirective+' '+e.blockedURI))"
)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def busy() -> Iterator[dict[str, Any]]:
    """Two emulated GPUs under load, and explanations of what was decided."""
    with served(*ZOO, "--explain") as told, loaded(told["url"], RATES):
        yield told


@pytest.fixture(scope="module")
def hostile() -> Iterator[dict[str, Any]]:
    with served(str(Path(__file__).parent / "hostile_app.py"), "--trust-deployers", emulate="") as told:
        yield told


class Console:
    """A page of the console that notes what its policy forbade and what went wrong in it."""

    def __init__(self, browser: Browser, told: dict[str, Any], scheme: str = "dark", width: int = 1280) -> None:
        self._context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})  # type: ignore[arg-type]
        self._context.add_init_script(RULES)
        self.page: Page = self._context.new_page()
        self.errors: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self._url = told["console_url"]

    def open(self, view: str) -> Page:
        self.page.goto(f"{self._url}/{view}")
        self.page.locator("main h1").first.wait_for()
        return self.page

    def until(self, what: str, limit_s: float = 30.0) -> Any:
        """The value of an expression once it is true. The policy forbids `wait_for_function`, which evaluates in the page."""
        end = time.monotonic() + limit_s
        while not (found := self.page.evaluate(what)):
            assert time.monotonic() < end, f"never: {what}\n{self.page.inner_text('body')[:2000]}"
            self.page.wait_for_timeout(50)
        return found

    def says(self, text: str, limit_s: float = 30.0) -> None:
        self.page.get_by_text(text).first.wait_for(timeout=1000 * limit_s)

    def check(self) -> None:
        assert self.page.evaluate("window.violations ?? []") == [] and not self.errors
        assert self.page.evaluate("window.pwned") is None

    def close(self) -> None:
        self.check()
        self._context.close()


def violations(page: Page) -> list[str]:
    found = Path(__import__("axe_playwright_python").__file__).parent / "axe.min.js"
    page.evaluate(found.read_text())
    told = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [f"{one['id']}: {one['nodes'][0]['html'][:200]}" for one in told["violations"]]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_view_shows_itself_and_breaks_no_rule(chromium: Browser, busy: dict[str, Any], scheme: str) -> None:
    pytest.importorskip("axe_playwright_python")
    console = Console(chromium, busy, scheme)
    for view in VIEWS:
        page = console.open(view)
        page.wait_for_load_state("load")
        console.until("!document.body.innerText.includes('Loading.') && document.querySelector('main').innerText.length > 20")
        assert violations(page) == [], view
        console.check()
    console.close()


def test_batches_are_drawn_as_they_run(chromium: Browser, busy: dict[str, Any]) -> None:
    console = Console(chromium, busy)
    page = console.open("")
    console.until("[...(window.laminaMaps ?? new Map()).values()].some(map => map.pictures > 20)")
    coloured = """() => { const c = document.querySelector('.map canvas');
        const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
        const seen = new Set(); for (let i = 0; i < d.length; i += 4) seen.add(d[i] + ',' + d[i+1] + ',' + d[i+2]);
        return seen.size; }"""
    console.until(f"({coloured})() > 5")
    for question in ("Is everything in time?", "What is the bottleneck?", "What would help?"):
        assert page.get_by_text(question).is_visible()
    page.get_by_text("Batches as a table").first.click()
    console.until("document.querySelectorAll('.card details[open] tbody tr').length > 3")
    page.get_by_role("button", name="2 s", exact=True).click()
    page.get_by_role("button", name="Pause").click()
    before = page.evaluate("[...window.laminaMaps.values()][0].pictures")
    page.wait_for_timeout(300)
    assert page.evaluate("[...window.laminaMaps.values()][0].pictures") - before <= 1
    console.close()


def test_the_keyboard_reaches_everything(chromium: Browser, busy: dict[str, Any]) -> None:
    console = Console(chromium, busy)
    page = console.open("functions")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "view"
    page.locator("nav a", has_text="Refusals").focus()
    page.keyboard.press("Enter")
    console.until("location.pathname.endsWith('/refusals')")
    page.go_back()
    console.until("location.pathname.endsWith('/functions')")
    console.close()


def test_a_refusal_is_explained_with_its_remedies(chromium: Browser, busy: dict[str, Any]) -> None:
    request = urllib.request.Request(
        f"{busy['url']}/v1/functions/swin_t", b"[1]", {"content-type": "application/json", "lamina-deadline-ms": "0.2"}
    )
    with pytest.raises(urllib.error.HTTPError, match="429") as refused:
        urllib.request.urlopen(request)
    call = json.load(refused.value)["id"]
    console = Console(chromium, busy)
    page = console.open(f"calls/{call}")
    console.says("would have been late")
    console.says("What would have let it in")
    assert "A deadline of" in page.inner_text("main") and "No number of units" in page.inner_text("main")
    console.open("refusals?target=swin_t")
    console.until("document.querySelectorAll('main tbody tr').length > 0")
    console.close()


def test_a_plan_is_simulated_and_saved(chromium: Browser, busy: dict[str, Any]) -> None:
    console = Console(chromium, busy)
    page = console.open("plan?more=h200")
    console.until("document.body.innerText.includes('h200: 3')")
    page.get_by_role("button", name="Simulate", exact=True).click()
    console.says("of calls in time", 90)
    assert "Simulated" in page.inner_text("main")
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save as scenario").click()
    assert "[[device]]" in Path(saved.value.path()).read_text()
    console.close()


# ------------------------------------------------------------------------------------ what can be done


def test_a_run_is_started_and_cancelled(chromium: Browser, hostile: dict[str, Any]) -> None:
    console = Console(chromium, hostile)
    page = console.open("runs/new/slow")
    page.get_by_label("x", exact=False).first.fill("hello <b>you</b>")
    page.get_by_role("button", name="Start", exact=True).click()
    console.until("/runs\\/[0-9a-f]{24}$/.test(location.pathname)")
    console.until("document.querySelector('.graph .running') !== null")
    page.get_by_role("button", name="Cancel").click()
    console.until("document.querySelector('.head .tag')?.innerText === 'cancelled'")
    assert page.get_by_role("button", name="Retry from where it failed").is_visible()
    console.close()


def test_a_run_of_a_thousand_steps_does_not_freeze_the_page(chromium: Browser, hostile: dict[str, Any]) -> None:
    request = urllib.request.Request(
        f"{hostile['url']}/v1/workflows/thousand",
        json.dumps(["<b>x"] * 1000).encode(),
        {"content-type": "application/json", "prefer": "respond-async"},
    )
    run = json.load(urllib.request.urlopen(request))["id"]
    console = Console(chromium, hostile)
    boxes = [{"name": f"<b>{n}", "kind": "task", "lines": ["<i>"], "inner": []} for n in range(1000)]
    edges = [{"from": f"<b>{n}", "to": f"<b>{n + 1}", "label": "", "is_error": False} for n in range(999)]
    graph = json.dumps({"boxes": boxes, "edges": edges})
    console.page.route("**/v1/console/graph/*", lambda route: route.fulfill(body=graph, content_type="application/json"))
    page = console.open(f"runs/{run}")
    console.until("document.querySelector('.head .tag')?.innerText === 'succeeded'", 90)
    console.until("document.querySelectorAll('.graph rect').length >= 600")
    started = time.monotonic()
    page.get_by_role("button", name="After").last.click()
    console.says("201 to 400 of")
    assert time.monotonic() - started < 10
    console.close()


def test_an_app_is_deployed_given_some_of_the_calls_and_rolled_back(
    chromium: Browser, hostile: dict[str, Any], tmp_path: Path
) -> None:
    console = Console(chromium, hostile)
    source = (
        "import lamina\napp = lamina.App('made')\n@app.function(scale=lamina.Scale(min=1, max=1))\ndef answer():\n    return {}\n"
    )
    page = console.open("apps")
    for version in (1, 2):
        package = tmp_path / f"made{version}.zip"
        package.write_bytes(zipped({"app.py": source.format(version).encode()}))
        if version == 1:
            page.get_by_label("Name").fill("made")
        page.get_by_label("Package, a zip with the code").set_input_files(package)
        page.get_by_role("button", name="Deploy", exact=True).click()
        console.says(f"Version {version} of made is", 60)
        page = console.open("apps/made")
        console.until("document.querySelector('.head .tag')?.innerText === 'serving'", 60)
    page.get_by_label("Percent of calls for version 1").fill("20")
    page.get_by_label("Percent of calls for version 2").fill("80")
    page.get_by_role("button", name="Set weights").click()
    console.says("The weights are set.", 60)
    console.until("document.querySelector('[aria-label=\"Percent of calls for version 1\"]').value === '20'", 60)
    page.get_by_label("Percent of calls for version 1").fill("0")
    page.get_by_label("Percent of calls for version 2").fill("100")
    page.get_by_role("button", name="Set weights").click()
    console.until("document.querySelector('[aria-label=\"Percent of calls for version 1\"]').value === '0'", 60)
    page.get_by_role("button", name="Roll back").click()
    console.says("Version 1 is served from now on.", 60)
    console.close()


def test_a_token_is_made_and_revoked(chromium: Browser, hostile: dict[str, Any]) -> None:
    console = Console(chromium, hostile)
    page = console.open("access/tokens")
    page.get_by_label("Name").fill("ci")
    page.get_by_role("button", name="Make", exact=True).click()
    token = page.locator("pre.secret").inner_text()
    assert token.startswith("lmt") and token not in page.evaluate(
        "JSON.stringify({...localStorage, ...sessionStorage}) + document.cookie + location.href"
    )
    request = urllib.request.Request(f"{hostile['admin_url']}/v1/whoami", headers={"authorization": f"Bearer {token}"})
    assert json.load(urllib.request.urlopen(request))["name"].startswith("token ci")
    page.get_by_role("button", name="Revoke").click()
    console.says("is revoked.")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(request)
    console.close()


def test_nothing_of_what_functions_say_is_markup(chromium: Browser, hostile: dict[str, Any]) -> None:
    console = Console(chromium, hostile)
    page = console.open("playground/fail")
    page.get_by_label("x", exact=False).first.fill("<script>window.pwned=1</script>")
    page.get_by_role("button", name="Call", exact=True).click()
    console.says("cannot take <img src=x")
    page = console.open("playground/echo")
    page.get_by_label("x", exact=False).first.fill("<svg onload='window.pwned=1'>")
    page.get_by_role("button", name="Call", exact=True).click()
    console.says("<svg onload='window.pwned=1'>")
    console.says("<b>Bold</b>")
    console.open("apps/hostile")
    console.says("echo <img src=x")
    page = console.open("playground/picture")
    page.get_by_role("button", name="Call", exact=True).click()
    page.locator("img.result").wait_for()
    assert page.locator("main script, main svg[onload]").count() == 0
    console.close()


def test_ten_thousand_functions_and_a_fuzzed_feed_do_not_freeze_it(chromium: Browser, busy: dict[str, Any]) -> None:
    console = Console(chromium, busy)
    bad = "<img src=x onerror=window.pwned=1>"
    rows = [
        {"name": f"{bad}{n}", "kind": "function", "met": n, "late": 0, "failed": 0, "refused": 0, "cost": 0, "goal": 0.99}
        for n in range(50)
    ]
    page = console.page
    body = json.dumps({"total": 10_000, "offset": 0, "functions": rows})
    page.route("**/v1/console/functions?*", lambda route: route.fulfill(body=body, content_type="application/json"))
    console.open("functions")
    console.says("1 to 50 of 10,000")
    console.open("")
    console.until("[...(window.laminaMaps ?? new Map()).values()].some(map => map.pictures > 5)")
    took = page.evaluate(
        """async () => {
            const { onFrame, live } = await import('/console/feed.js');
            const device = live.pulse.devices[0].id, now = live.pulse.now;
            const begin = performance.now();
            for (let frame = 0; frame < 100; frame += 1) {
                const started = [], finished = [];
                for (let n = 0; n < 250; n += 1) {
                    const id = 1e9 + frame * 250 + n;
                    const place = [n % 7 ? device : 'none', n % 40 - 3, n % 11 - 1, '<b onclick=window.pwned=1>' + n];
                    started.push([id, ...place, now - n * 1000, n % 3 ? 5000 : -5, n, n % 5 ? 0 : id - 1]);
                    if (n % 2) finished.push([id, now - n * 500, n % 4 ? 100 : -100, n % 9 ? '' : '<script>']);
                }
                onFrame({ now, started, finished, left_out: 0 });
            }
            return performance.now() - begin;
        }"""
    )
    assert took < 20_000
    console.until("[...window.laminaMaps.values()].some(map => map.pictures > 10)")
    console.close()


def test_a_server_that_asks_for_a_token_gets_one_from_a_form(chromium: Browser, tmp_path: Path) -> None:
    from tests.gateway.console.token_server import token_server

    with token_server(tmp_path) as (told, token):
        console = Console(chromium, told)
        page = console.open("functions")
        console.says("Sign in")
        page.get_by_label("Token").last.fill("lmt_wrong")
        page.get_by_role("button", name="Sign in").click()
        console.says("unknown token")
        page.get_by_label("Token").last.fill(token)
        page.get_by_role("button", name="Sign in").click()
        console.until("document.querySelector('main tbody tr') !== null")
        assert token not in page.evaluate(
            "JSON.stringify({...localStorage, ...sessionStorage}) + document.cookie + location.href"
        )
        page.get_by_role("button", name="Sign out").click()
        console.says("This server asks for a token.")
        console.close()
