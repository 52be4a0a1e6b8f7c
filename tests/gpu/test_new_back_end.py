"""A new back end is one file: found by its name or its path, it passes the contract and serves, with no other edit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lamina import plugins
from lamina.bootstrap import open_local
from lamina.cli.serve import Gpus
from lamina.gateway.bootstrap import open_gateway
from lamina.gpu import discovery, slicers
from lamina.gpu.slicers import back_end, open_slicer
from tests.gpu import test_slicer_contract as contract
from tests.serving import Browser, run, write_app

MINE = '''
"""Slices of an imaginary accelerator with three units."""

from __future__ import annotations

from lamina.gpu.slicer import HostSlicer, SliceCatalogue, SlicerCheck, check_mask
from lamina.gpu.slicers.null import NullSlice
from lamina.types import DeviceSpec, SliceLimits


class MineSlicer(HostSlicer):
    name = "mine"

    def __init__(self, soft: bool) -> None:
        limits = SliceLimits(batches_per_instance=0, soft=soft)
        self.device = DeviceSpec(id="mine0", kind="mine", units=3, memory_mib=512, limits=limits)
        self._catalogue = SliceCatalogue(self.device)

    @classmethod
    def open(cls, ordinal: int, *, soft: bool) -> MineSlicer:
        return cls(soft)

    @classmethod
    def check(cls) -> SlicerCheck:
        return SlicerCheck("mine", True, "three units")

    def slice(self, mask: int) -> NullSlice:
        found = self._catalogue.lookup(mask)
        if found is None:
            found = self._catalogue.slices[mask] = NullSlice(mask)
        return found

    def environment(self, mask: int, memory_mib: int = 0) -> dict[str, str]:
        check_mask(self.device, mask)
        return {"MINE_UNITS": hex(mask)}

    def close(self) -> None:
        self._catalogue.drain()


BACK_END = MineSlicer
'''

APP = """import lamina
app = lamina.App("on-mine")

@app.function(gpu=lamina.GPU("1/3"))
def twice(x):
    return 2 * x
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


@pytest.fixture
def installed(file: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The file lies in `gpu/slicers`."""
    monkeypatch.setattr(slicers, "__path__", [*slicers.__path__, str(file.parent)])
    monkeypatch.delitem(sys.modules, "lamina.gpu.slicers.mine", raising=False)
    return "mine"


def test_it_is_found_by_its_name(installed: str):
    assert installed in plugins.names(slicers.PACKAGE) and back_end(installed).name == "mine"


def test_the_doctor_names_it(installed: str):
    assert ("mine", "three units") in [(check.name, check.what) for check in discovery.check_slicers()]


def test_it_is_a_choice_of_the_server(installed: str, file: Path):
    gpus = Gpus()
    assert installed in gpus.choices and gpus.convert(str(file), None, None) == str(file)


CONTRACT = [name for name in dir(contract) if name.startswith("test_") and "refused" not in name]


@pytest.mark.parametrize("claim", CONTRACT)
@pytest.mark.parametrize("soft", [False, True])
def test_it_passes_the_contract(installed: str, claim: str, soft: bool):
    getattr(contract, claim)(open_slicer(installed, soft=soft))


@pytest.mark.parametrize("wrong", [0, -1, "beyond", "gap"])
def test_it_refuses_what_is_no_block(installed: str, wrong: int | str):
    contract.test_what_is_no_block_of_the_device_is_refused_with_a_hint(open_slicer(installed), wrong)


@pytest.mark.live
def test_a_server_runs_functions_on_it(file: Path, tmp_path: Path):
    """Its executor is a process of its own, which finds the file by its path."""

    async def work() -> tuple[set[str], int]:
        live = open_local(str(write_app(tmp_path, APP)), gpu=str(file))
        gateway = await open_gateway(live)
        try:
            async with Browser(gateway.port) as browser:
                answer = await browser.post("/v1/functions/twice", 21)
            return set(gateway.driver.controller.state.functions["twice"].instances_by_device), answer.json
        finally:
            await gateway.stop(0)

    assert run(work) == ({"mine0"}, 42)
