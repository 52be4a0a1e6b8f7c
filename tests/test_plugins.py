"""Plugins: the file name is the registration."""

from __future__ import annotations

import pytest

from lamina import plugins
from lamina.errors import UnknownPlugin


def test_the_policies_are_the_files_in_their_folder():
    assert {"edf", "fifo"} <= set(plugins.names("policies"))
    assert not [name for name in plugins.names("policies") if name.startswith("_")]


@pytest.mark.parametrize("name", plugins.names("policies"))
def test_every_policy_loads_and_says_what_it_is(name: str):
    module = plugins.load("policies", name)
    assert module.__doc__
    assert module.Policy.__doc__


def test_a_near_miss_is_answered_with_the_name_that_was_meant():
    with pytest.raises(UnknownPlugin, match=r"no 'efd' in policies; there are .*edf") as caught:
        plugins.load("policies", "efd")
    assert caught.value.hint == "did you mean 'edf'?"


@pytest.mark.parametrize("name", ["", "__init__", "../policies/edf", "os", "edf.policy", "lamina.policies.edf"])
def test_only_a_name_from_the_folder_is_loaded(name: str):
    with pytest.raises(UnknownPlugin):
        plugins.load("policies", name)


def test_a_path_loads_that_very_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("class Policy:\n    order = 'arrival'\n")
    assert plugins.load("policies", str(path)).Policy.order == "arrival"


def test_a_path_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UnknownPlugin, match=r"absent\.py"):
        plugins.load("policies", str(tmp_path / "absent.py"))
