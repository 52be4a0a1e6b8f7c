"""Theme of all pages that Lamina makes: the colours and letters of the console, for reports and plans as well."""

from __future__ import annotations

from functools import cache
from importlib import resources


@cache
def theme_css() -> str:
    return (resources.files("lamina.gateway.console") / "static" / "theme.css").read_text("utf-8")
