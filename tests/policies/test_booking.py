"""Early commit: a slice is committed early only where no other queue on the device is due sooner."""

from __future__ import annotations

import pytest

from lamina.core.policy import DispatchRole
from lamina.core.workflow.flow import Flow, Task
from lamina.policies import edf, frontier
from lamina.types import DeviceSpec, Slo
from tests.script import Script, a_function

MS = 1_000
CORE = DeviceSpec(id="cpu0", kind="cpu", units=1, memory_mib=1_000, family="cpu", owned=True)
PAGE = Flow("page", {"find": Task("find", "find", ("read",)), "read": Task("read", "read")}, ("find",), Slo(latency_us=500 * MS))


@pytest.mark.parametrize("policy", [edf.Policy(), frontier.Policy()], ids=["edf", "frontier"])
def test_the_last_step_of_an_old_run_is_before_the_first_step_of_a_new_one(script: Script, policy: DispatchRole):
    """One core, ten milliseconds a step. The third page comes when the lines of the first are found and the second has the
    core: until that is free there is time to see who is due sooner."""
    functions = [a_function("find", gpu="no"), a_function("read", gpu="no", max_batch=8)]
    takes = {"find": 10 * MS, "read": (0, 10 * MS)}
    script.given(*functions, flows=[PAGE], devices=[CORE], policy=policy, takes=takes, engine=True)
    for number, at_ms in enumerate((0, 1, 12)):
        script.at(at_ms * MS).arrives(f"c{number}", target="page", within_us=500 * MS)
    script.at(500 * MS)
    order = [(batch.function, batch.jobs[0].call_id) for batch in script.batches]
    assert order.index(("read", "c0")) < order.index(("find", "c2"))


@pytest.mark.parametrize("policy", [edf.Policy(), frontier.Policy()], ids=["edf", "frontier"])
def test_where_no_other_function_waits_a_full_batch_is_booked_at_once(script: Script, policy: DispatchRole):
    script.given(a_function(gpu="no"), devices=[CORE], policy=policy, takes={"f": 10 * MS}, engine=True)
    script.at(0).arrives("c1", within_us=100 * MS)
    script.at(1 * MS).arrives("c2", within_us=100 * MS)
    assert [batch.behind for batch in script.batches] == [0, 1]
