"""Hot standby with the device open, on null slices: what it has ready, and what of it is used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lamina.gpu import discovery
from lamina.gpu.protocol import ExecutorReady, FunctionLoaded, LoadFunction, PrepareStandby, Promote, StandbyPrepared
from tests.gpu.executor_harness import GpuStage
from tests.serving import write_app

pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.live

APP = """
import lamina, torch

app = lamina.App("tested")

@app.function(gpu="1/4", batch=4)
class Add(lamina.TorchModel):
    def load(self):
        with open(__file__ + ".opened", "a") as file:
            file.write("x")
        return torch.nn.Linear(4, 4), torch.zeros(1, 4)

@app.function(gpu="1/4")
class Broken(lamina.TorchModel):
    def load(self):
        raise ValueError("no weights")

@app.function(gpu="1/4")
def plain(x):
    return x
"""


class Spare:
    def __init__(self, folder: Path, slicer: str) -> None:
        self._app = write_app(folder, APP)
        self._stage = GpuStage(self._app, slicer, spare=True)
        self.tell, self.hear, self.close = self._stage.tell, self._stage.hear, self._stage.close

    @property
    def opened(self) -> int:
        """How often the user's code ran."""
        mark = Path(f"{self._app}.opened")
        return mark.stat().st_size if mark.exists() else 0

    def load(self, function: str) -> FunctionLoaded:
        self.tell(LoadFunction(f"{function}#1", function, 0, 0, is_reload=True))
        found: FunctionLoaded = self.hear(FunctionLoaded)
        return found


@pytest.fixture(scope="module")
def has_gpu() -> bool:
    return bool(discovery.find_gpus_in_subprocess())


@pytest.fixture(params=["null", pytest.param("green", marks=pytest.mark.gpu)])
def spare(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Spare]:
    if request.param == "green" and not request.getfixturevalue("has_gpu"):
        pytest.skip("no GPU here")
    spare = Spare(tmp_path, request.param)
    yield spare
    spare.close()


def test_a_module_that_stood_by_is_loaded_without_running_the_users_code_again(spare: Spare):
    spare.tell(PrepareStandby([("add", 0, "")]))
    assert spare.hear(StandbyPrepared).functions == ["add"]
    spare.tell(Promote())
    spare.hear(ExecutorReady)
    loaded = spare.load("add")
    assert spare.opened == 1 and loaded.was_standby


def test_what_is_asked_for_while_it_is_being_made_ready_is_opened_once(spare: Spare):
    spare.tell(PrepareStandby([("add", 0, "")]), Promote())
    spare.load("add")
    assert spare.opened == 1


def test_what_does_not_stand_by_is_opened_as_ever(spare: Spare):
    spare.tell(Promote())
    loaded = spare.load("add")
    assert spare.opened == 1 and not loaded.was_standby


def test_what_is_not_wanted_any_more_does_not_stand_by(spare: Spare):
    spare.tell(PrepareStandby([("add", 0, "")]))
    spare.hear(StandbyPrepared)
    spare.tell(PrepareStandby([]), Promote())
    spare.load("add")
    assert spare.opened == 2


def test_a_function_that_cannot_be_opened_and_a_callable_keep_no_other_from_standing_by(spare: Spare):
    spare.tell(PrepareStandby([("broken", 0, ""), ("plain", 0, ""), ("add", 0, "")]))
    assert spare.hear(StandbyPrepared).functions == ["add"]


def test_a_spare_speaks_of_nothing_but_what_stands_by_until_it_is_told_to_go(spare: Spare):
    spare.tell(PrepareStandby([("add", 0, "")]))
    first = spare.hear(object)
    spare.tell(Promote())
    assert [type(first), type(spare.hear(object))] == [StandbyPrepared, ExecutorReady]
