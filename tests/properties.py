"""Settings of property tests that need more or fewer examples than others."""

from __future__ import annotations

from hypothesis import settings


def examples(number: int) -> settings:
    """So many, where the profile has 100; in a quick run, which has fewer, as many fewer."""
    default = settings.default
    assert default is not None
    return settings(default, max_examples=max(5, number * default.max_examples // 100))
