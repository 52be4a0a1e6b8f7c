"""Pictures of the console for the documentation, from a server on emulated GPUs under load: `make screenshots`."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.console.demo import ROOT, STUDIO, STUDIO_RATES, administer, loaded, served

FOLDER = ROOT / "docs" / "img" / "console"
SETTLED = """import('/console/feed.js').then(({ live }) => live.pulse && live.pulse.window_s > 25 && live.pulse.lag_ms < 120
    && live.pulse.devices.every((device) => device.held > 0.3))"""
"""The first screen has half a minute of calls, both devices are in use, and nothing else has just stopped the machine."""

PATIENCE_S = 90.0


@dataclass(frozen=True, slots=True)
class Shot:
    name: str
    address: Callable[[dict[str, Any]], str]
    scheme: str
    width: int
    height: int
    prepare: Callable[[Any], None] = lambda page: None


def _get(url: str) -> Any:
    with urllib.request.urlopen(url) as answer:
        return json.load(answer)


def _ended(told: dict[str, Any], outcome: str, fits: Callable[[dict[str, Any]], bool]) -> str:
    """A recent call that ended so, by what the console knows of it."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        for row in _get(f"{told['admin_url']}/v1/console/calls?outcome={outcome.replace(' ', '+')}&limit=100")["calls"]:
            with contextlib.suppress(urllib.error.HTTPError):  # it is forgotten by now
                if fits(_get(f"{told['admin_url']}/v1/console/calls/{row['id']}")):
                    return f"calls/{row['id']}"
        time.sleep(0.2)
    return "calls"


def _refused(told: dict[str, Any]) -> str:
    """A call that has less time than the others, until one finds too much before it."""
    headers = {"content-type": "application/json", "lamina-deadline-ms": "110"}
    for _ in range(400):
        request = urllib.request.Request(f"{told['url']}/v1/functions/vgg16", b"[1]", headers)
        try:
            urllib.request.urlopen(request).close()
        except urllib.error.HTTPError as error:
            call = json.load(error)["id"]
            terms = {term["name"]: term["ms"] for term in _get(f"{told['admin_url']}/v1/console/calls/{call}")["terms"]}
            if terms.get("expected", 0) > 4 * terms.get("unread", 0):
                return f"calls/{call}"
    return "refusals"


def _answered(told: dict[str, Any]) -> str:
    return _ended(told, "in time", lambda call: call["target"] == "convnext_large" and bool(call["steps"][0].get("mates")))


def _run(told: dict[str, Any]) -> str:
    headers = {"content-type": "application/json", "prefer": "respond-async"}
    request = urllib.request.Request(f"{told['url']}/v1/workflows/describe_album", b"[1, 2, 3, 4, 5, 6, 7, 8]", headers)
    with urllib.request.urlopen(request) as answer:
        run = json.load(answer)["id"]
    end = time.monotonic() + PATIENCE_S
    while _get(f"{told['url']}/v1/runs/{run}")["state"] not in ("succeeded", "failed") and time.monotonic() < end:
        time.sleep(0.1)
    return f"runs/{run}"


def _settle(page: Any) -> None:
    end = time.monotonic() + PATIENCE_S
    while not page.evaluate(SETTLED) and time.monotonic() < end:
        page.wait_for_timeout(250)


def _simulate(page: Any) -> None:
    page.get_by_role("button", name="Simulate", exact=True).click()
    page.get_by_text("of calls in time").first.wait_for(timeout=120_000)


def _open_step(page: Any) -> None:
    page.locator("summary").first.click()


def _scroll_to_profile(page: Any) -> None:
    page.get_by_text("Profile against observed").first.wait_for()
    page.get_by_text("Profile against observed").first.scroll_into_view_if_needed()
    page.evaluate("scrollTo(0, document.body.scrollHeight)")


SHOTS = [
    Shot("devices-dark", lambda told: "", "dark", 1280, 1060, _settle),
    Shot("devices-light", lambda told: "", "light", 1280, 1060, _settle),
    Shot("devices-narrow", lambda told: "", "dark", 420, 1240, _settle),
    Shot("refusal", _refused, "dark", 1280, 800),
    Shot("call", _answered, "light", 1280, 760, _open_step),
    Shot("function", lambda told: "functions/efficientnet_b7", "dark", 1280, 900, _scroll_to_profile),
    Shot("run", _run, "light", 1280, 800),
    Shot("plan", lambda told: "plan?more=v100", "light", 1280, 800, _simulate),
]


def main(names: list[str]) -> int:
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        print("no Chromium: apt-get install chromium")
        return 1
    FOLDER.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as open_things:
        told = open_things.enter_context(served(*STUDIO, "--explain", emulate="v100x2"))
        administer(told["admin_url"], "tenant/set", name="gallery", weight=2)
        administer(told["admin_url"], "tenant/set", name="trial", rate_per_s=5, burst=5)
        tokens = {
            tenant: administer(told["admin_url"], "token/create", name=tenant, tenant=tenant, scopes=["invoke"], expires="1d")
            for tenant in ("gallery", "trial")
        }
        open_things.enter_context(loaded(told["url"], STUDIO_RATES, token=tokens["gallery"]["token"]))
        open_things.enter_context(loaded(told["url"], {"resnet50": 9.0}, token=tokens["trial"]["token"]))
        driver = open_things.enter_context(sync_playwright())
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for shot in SHOTS:
            if names and shot.name not in names:
                continue
            context = browser.new_context(color_scheme=shot.scheme, viewport={"width": shot.width, "height": shot.height})
            page = context.new_page()
            page.goto(f"{told['console_url']}/{shot.address(told)}")
            page.wait_for_timeout(3_000)
            shot.prepare(page)
            page.wait_for_timeout(500)
            path = FOLDER / f"{shot.name}.png"
            page.screenshot(path=str(path))
            print(path.relative_to(ROOT), f"{path.stat().st_size // 1024} kB", flush=True)
            context.close()
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
