"""Pictures of the console for the documentation, from a server on emulated GPUs under load: `make screenshots`."""

from __future__ import annotations

import json
import shutil
import sys
import time
import urllib.request
from typing import Any

from benchmarks.console.demo import RATES, ROOT, ZOO, loaded, served

FOLDER = ROOT / "docs" / "img" / "console"
SHOTS = [
    ("devices-dark", "", "dark", 1280, 1010),
    ("devices-light", "", "light", 1280, 1010),
    ("devices-narrow", "", "dark", 420, 1100),
    ("refusal", "call", "dark", 1280, 640),
    ("run", "run", "light", 1280, 720),
    ("plan", "plan?more=h200", "light", 1280, 760),
]
"""Name, view, colours, width and height."""


def _get(url: str, **headers: str) -> Any:
    return json.load(urllib.request.urlopen(urllib.request.Request(url, headers=headers)))


def _refused(told: dict[str, Any]) -> str:
    body, headers = b"[1]", {"content-type": "application/json", "lamina-deadline-ms": "1.5"}
    for _ in range(50):
        try:
            urllib.request.urlopen(urllib.request.Request(f"{told['url']}/v1/functions/swin_t", body, headers)).read()
        except urllib.error.HTTPError as error:
            if error.code == 429:
                return f"calls/{json.load(error)['id']}"
    return "refusals"


def _run(told: dict[str, Any]) -> str:
    headers = {"content-type": "application/json", "prefer": "respond-async"}
    run = json.load(urllib.request.urlopen(urllib.request.Request(f"{told['url']}/v1/workflows/describe_album", b"[1]", headers)))
    time.sleep(1)
    return f"runs/{run['id']}"


def main() -> int:
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        print("no Chromium: apt-get install chromium")
        return 1
    FOLDER.mkdir(parents=True, exist_ok=True)
    with served(*ZOO, "--explain") as told, loaded(told["url"], RATES), sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, view, scheme, width, height in SHOTS:
            context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": height})
            page = context.new_page()
            address = {"call": _refused, "run": _run}.get(view, lambda _, view=view: view)(told)
            page.goto(f"{told['console_url']}/{address}")
            page.wait_for_timeout(3_000)
            if not view:
                page.get_by_role("button", name="2 s", exact=True).click()
                page.wait_for_timeout(9_000)
            if view.startswith("plan"):
                page.get_by_role("button", name="Simulate", exact=True).click()
                page.get_by_text("of calls in time").first.wait_for(timeout=90_000)
            path = FOLDER / f"{name}.png"
            page.screenshot(path=str(path))
            print(path.relative_to(ROOT), f"{path.stat().st_size // 1024} kB")
            context.close()
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
