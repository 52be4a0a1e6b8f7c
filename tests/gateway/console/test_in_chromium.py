"""The console in a real browser: every view with data of a running server, both schemes, all its actions, hostile data.

Optional: with playwright and Chromium (`pip install '.[browser]'`, `apt-get install chromium`), and axe for accessibility.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from benchmarks.console.demo import RATES, ZOO, loaded, served

from tests.gateway.deploy.admin_fixture import zipped

pytest.importorskip("playwright")
from playwright.sync_api import Browser, Page, Route, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome") or ""
pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.skipif(not CHROMIUM, reason="no Chromium")]

VIEWS = [
    *(
        "devices",
        "functions",
        "functions/resnet50",
        "functions/describe_album",
        "calls",
        "refusals",
        "runs",
        "runs/new/describe_album",
    ),
    *("plan", "apps", "apps/zoo", "access/tenants", "access/tokens", "access/users", "access/secrets", "access/bills"),
    *("access/audit", "playground", "playground/resnet50", "cluster", "nowhere"),
]
SHOWN = "!document.body.innerText.includes('Loading.') && document.querySelector('main').innerText.length > 20"
TOO_WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
LONELY_CHARTS = """[...document.querySelectorAll('main canvas, main svg[role=img]')]
    .filter(chart => !chart.closest('section.card')?.querySelector('table, details') && !chart.closest('.graph'))
    .map(chart => chart.outerHTML.slice(0, 99))"""
MOUSE_ROWS = "[...document.querySelectorAll('tr[data-href]')].filter(row => !row.querySelector('a[href]')).length"
MAX_ELEMENTS = 15_000
"""Of a page: lists are cut or paged, however much there is."""

DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
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


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A server without devices, and one agent."""
    app, folder = str(Path(__file__).parents[3] / "examples" / "cluster" / "app.py"), tmp_path_factory.mktemp("agent")
    with served(app, "--no-devices", "--no-probe", "--agents", "127.0.0.1:0", emulate="") as told:
        command = [sys.executable, "-m", "lamina", "agent", "--join", f"127.0.0.1:{told['agents_port']}", "--name", "red"]
        command += ["--gpu", "no", "--folder", str(folder), "--grace", "1s"]
        with open(folder / "log", "wb") as log:
            agent = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            yield told
        finally:
            agent.terminate()
            try:
                agent.wait(20)
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()


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


def press_until(console: Console, found: str, most: int = 120) -> None:
    """Press Tab until the focus is on such an element."""
    for _ in range(most):
        console.page.keyboard.press("Tab")
        if console.page.evaluate(f"document.activeElement.matches({json.dumps(found)})"):
            return
    raise AssertionError(f"Tab never comes to {found}")


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
        console.until(SHOWN)
        assert page.evaluate(TOO_WIDE) <= 0, f"{view}: wider than the screen"
        assert violations(page) == [], view
        assert page.evaluate(LONELY_CHARTS) == [], f"{view}: a chart without a table beside it"
        assert page.evaluate(MOUSE_ROWS) == 0, f"{view}: a row that opens by mouse alone"
        console.check()
    console.close()


def test_no_view_is_wider_than_a_telephone(chromium: Browser, busy: dict[str, Any]) -> None:
    console = Console(chromium, busy, width=420)
    for view in VIEWS:
        page = console.open(view)
        console.until(SHOWN)
        assert page.evaluate(TOO_WIDE) <= 0, view
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
    console.until("document.querySelector('main tbody tr') !== null")
    press_until(console, "main tbody a")
    name = page.evaluate("document.activeElement.innerText")
    page.keyboard.press("Enter")
    console.until(f"location.pathname.endsWith({json.dumps('/functions/' + name)})")
    console.close()


def test_a_function_is_called_without_a_mouse(chromium: Browser, hostile: dict[str, Any]) -> None:
    console = Console(chromium, hostile)
    page = console.open("playground/echo")
    page.locator("main textarea").wait_for()
    press_until(console, "main textarea")
    page.keyboard.type("by keyboard")
    press_until(console, "button.main")
    page.keyboard.press("Enter")
    console.says('"by keyboard"')
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
    console.says("Why it was refused: would have been late")
    told = page.inner_text("main")
    assert "It had 200 µs from its arrival to its answer." in told and "too late." in told
    assert "What was weighed" in told and "What would have let it in" in told
    assert "A deadline of" in told and "No number of units" in told
    assert page.locator(".phases i").count() >= 2 and page.locator(".phases b").count() == 1  # terms, and the deadline
    console.open("refusals?target=swin_t")
    console.until("document.querySelectorAll('main tbody tr').length > 0")
    console.close()


def test_the_profile_is_drawn_beside_what_was_observed(chromium: Browser, busy: dict[str, Any]) -> None:
    console = Console(chromium, busy)
    page = console.open("functions/resnet50")
    console.says("Profile against observed")
    console.until("[...document.querySelectorAll('[aria-label=\"Observed batches\"] tbody tr')].length > 0")
    assert (
        page.get_by_role("heading", name="Queue by tenant").is_visible()
        and page.get_by_role("heading", name="Batch sizes").is_visible()
    )
    console.close()


def test_a_call_shows_its_phases_and_its_batch(chromium: Browser, busy: dict[str, Any]) -> None:
    console = Console(chromium, busy)
    page = console.open("calls?outcome=in+time&target=resnet50")
    page.locator("main tbody a").first.click()
    console.until("document.querySelectorAll('.phases i').length > 0")
    page.locator("summary").first.click()
    console.until("/alone in its batch|shared its batch/.test(document.querySelector('main').innerText)")
    assert "on slices" in page.inner_text("main") and "cost" in page.inner_text("main")
    console.close()


def test_the_lists_of_calls_stand_still_when_told_to(chromium: Browser, busy: dict[str, Any]) -> None:
    console = Console(chromium, busy)
    page = console.open("calls")
    console.until("document.querySelector('main tbody tr') !== null")
    asked: list[str] = []
    page.get_by_role("button", name="Pause").click()

    def pass_pulses(count: int) -> None:  # a second each
        heard = "import('/console/feed.js').then(feed => feed.live.pulse?.now ?? 0)"
        before = console.until(heard)
        console.until(f"{heard}.then(now => now > {before} + {count}e6)", 60)

    pass_pulses(2)  # what was asked as it was told to stand still is answered by now
    page.on("request", lambda request: asked.append(request.url) if "/v1/console/calls" in request.url else None)
    pass_pulses(5)
    assert asked == []
    console.close()


def test_nodes_and_their_leader_are_shown_and_a_node_is_drained(chromium: Browser, cluster: dict[str, Any]) -> None:
    console = Console(chromium, cluster)
    page = console.open("")
    console.says("1 node, led by this server in epoch", 90)
    console.until("document.querySelectorAll('.map canvas').length > 0", 90)
    page.get_by_role("link", name="Cluster").first.click()
    console.until("document.querySelector('main tbody .tag')?.innerText === 'live'", 60)
    page.get_by_role("button", name="Drain red").click()
    console.says("red takes nothing new", 60)
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


@pytest.mark.parametrize(("workflow", "given"), [("thousand", ["<b>x"] * 1000), ("machine", "<i>go")])
def test_a_run_of_a_thousand_steps_does_not_freeze_the_page(
    chromium: Browser, hostile: dict[str, Any], workflow: str, given: Any
) -> None:
    """A map over a thousand items, and a machine of a thousand states: what is in the page stays bounded."""
    request = urllib.request.Request(
        f"{hostile['url']}/v1/workflows/{workflow}",
        json.dumps(given).encode(),
        {"content-type": "application/json", "prefer": "respond-async"},
    )
    run = json.load(urllib.request.urlopen(request))["id"]
    console = Console(chromium, hostile)
    page = console.open(f"runs/{run}")
    console.until("document.querySelector('.head .tag')?.innerText === 'succeeded'", 120)
    console.until("document.querySelectorAll('.graph rect').length >= " + ("600" if workflow == "machine" else "1"))
    assert page.evaluate("document.querySelectorAll('*').length") < MAX_ELEMENTS
    if workflow == "thousand":
        page.get_by_role("button", name="After").last.click()
        console.says("201 to 400 of")
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
    console.says("⟨U+202E⟩gnp.exe")  # a mark that would turn the text around is shown as such
    page = console.open("playground/echo")
    page.get_by_label("x", exact=False).first.fill("<svg onload='window.pwned=1'>")
    page.get_by_role("button", name="Call", exact=True).click()
    console.says("<svg onload='window.pwned=1'>")
    console.says("<b>Bold</b>")
    page = console.open("apps/hostile")
    console.says("echo <img src=x")
    assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
    console.open("calls?outcome=failed")
    console.until("document.querySelector('main tbody tr') !== null")
    page = console.open("playground/picture")
    page.get_by_role("button", name="Call", exact=True).click()
    page.locator("img.result").wait_for()
    assert page.locator("main script, main svg[onload]").count() == 0
    console.close()


def test_a_picture_is_uploaded_and_sound_comes_back(chromium: Browser, hostile: dict[str, Any], tmp_path: Path) -> None:
    picture = tmp_path / "dot.png"
    picture.write_bytes(base64.b64decode(DOT))
    console = Console(chromium, hostile)
    page = console.open("playground/size_of")
    page.locator("main input[type=file]").set_input_files(picture)
    page.locator("img.result").wait_for()  # what is about to be sent
    page.get_by_role("button", name="Call", exact=True).click()
    console.until(f"document.querySelector('[role=status] pre')?.innerText === '{picture.stat().st_size}'")
    page = console.open("playground/tone")
    page.get_by_role("button", name="Call", exact=True).click()
    page.locator("main audio").wait_for()
    console.close()


def test_a_function_that_takes_messages_can_be_talked_to(chromium: Browser, hostile: dict[str, Any]) -> None:
    console = Console(chromium, hostile)
    page = console.open("playground/talk")
    page.get_by_role("button", name="Chat", exact=True).click()
    page.locator(".chat textarea").fill("good <b>morning</b>")
    page.keyboard.press("Enter")
    console.until("document.querySelector('.bubble.assistant')?.innerText.includes('good <b>morning</b>')")
    console.until("!document.querySelector('.chat button.main').disabled")
    page.locator(".chat textarea").fill("again")
    page.keyboard.press("Enter")
    console.until("[...document.querySelectorAll('.bubble.assistant')].at(-1)?.innerText.includes('again')")
    console.close()


def _fulfill(body: str, route: Route) -> None:
    route.fulfill(body=body, content_type="application/json")


def test_names_of_any_length_and_content_stay_inside_of_their_place(chromium: Browser, busy: dict[str, Any]) -> None:
    """The server takes no such names; the page does not rely on that."""
    bad = "<img src=x onerror=window.pwned=1>\u202e" + "n" * 10_000
    row = {"name": bad, "kind": "function", "met": 1, "late": 0, "failed": 0, "refused": 1, "cost": 0, "goal": 0.99, "slo_ms": 5}
    call = {"id": "c<b>" * 9, "what": "refused", "age_ms": 5, "target": bad, "tenant": bad, "reason": bad, "offer_ms": 3}
    node = {"name": bad, "state": bad, "incarnation": 1, "epoch": 1, "address": bad, "silent_ms": 1, "rtt_us": 1, "lag_us": 1}
    tenant = {"name": bad, "weight": 1}
    answers = {
        "**/v1/console/functions?*": {"total": 1, "offset": 0, "functions": [row]},
        "**/v1/console/calls?*": {"calls": [call]},
        "**/v1/nodes": [node | {"devices": [], "instances": [], "packages": []}],
        "**/v1/admin/tenant/list": [tenant],
        "**/calls/v1/runs?*": {"runs": [{"id": bad, "target": bad, "state": bad, "created_us": 1, "tenant": bad}]},
    }
    console = Console(chromium, busy)
    for pattern, answer in answers.items():
        body = json.dumps(answer, ensure_ascii=False)
        console.page.route(pattern, partial(_fulfill, body))
    for view in ("functions", "calls", "refusals", "cluster", "access/tenants", "runs"):
        page = console.open(view)
        console.until("document.querySelector('main tbody tr') !== null")
        assert page.locator("main img").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0, view
        assert "\u202e" not in page.inner_text("main")
        console.check()
    console.close()


def test_ten_thousand_functions_are_shown_a_page_at_a_time(chromium: Browser, tmp_path: Path) -> None:
    app = tmp_path / "many.py"
    app.write_text(
        "import lamina\napp = lamina.App('many')\nfor number in range(10_000):\n"
        "    app.function(name=f'f{number:05}')(lambda x: x)\n"
    )
    with served(str(app), "--no-probe", emulate="") as told:
        console = Console(chromium, told)
        page = console.open("functions?sort=name")
        console.says("1 to 50 of 10,000", 90)
        page.get_by_role("button", name="After").click()
        console.says("51 to 100 of 10,000")
        page.get_by_label("Search").fill("f09999")
        console.until("document.querySelectorAll('main tbody tr').length === 1")
        assert page.evaluate("document.querySelectorAll('*').length") < MAX_ELEMENTS
        page = console.open("playground/f09999")
        page.locator("main textarea").wait_for(timeout=90_000)
        assert page.evaluate("document.querySelectorAll('*').length") < MAX_ELEMENTS
        console.open("")
        console.says("Is everything in time?")
        console.open("runs/new/f00000")
        console.until("document.querySelectorAll('main option').length > 100", 90)
        console.close()


def test_a_fuzzed_feed_does_not_freeze_it(chromium: Browser, busy: dict[str, Any]) -> None:
    console = Console(chromium, busy)
    page = console.open("")
    console.until("[...(window.laminaMaps ?? new Map()).values()].some(map => map.pictures > 5)")
    kept = page.evaluate(
        """async () => {
            const { onFrame, live } = await import('/console/feed.js');
            const device = live.pulse.devices[0].id, now = live.pulse.now;
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
            return live.open.size;
        }"""
    )
    assert kept >= 12_500
    before = page.evaluate("[...window.laminaMaps.values()][0].pictures")
    console.until(f"[...window.laminaMaps.values()][0].pictures > {before} + 5", 60)
    page.locator("nav a", has_text="Functions").click()
    console.until("location.pathname.endsWith('/functions') && document.querySelector('main tbody tr') !== null", 60)
    console.close()


LATE_FRAMES = """
const soon = window.setTimeout;
window.requestAnimationFrame = (draw) => soon(draw, 1000);
window.setTimeout = (work, ms = 0, ...given) => soon(work, ms < 200 ? 1000 : ms, ...given);
"""


def test_a_page_that_is_drawn_late_asks_for_a_token_as_well(chromium: Browser, tmp_path: Path) -> None:
    """The server refuses the feed before the page has drawn its first frame."""
    from tests.gateway.console.token_server import token_server

    with token_server(tmp_path) as (told, _):
        console = Console(chromium, told)
        console.page.add_init_script(LATE_FRAMES)
        console.open("functions")
        console.says("This server asks for a token.", limit_s=10)
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
