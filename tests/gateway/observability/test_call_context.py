"""Call context end to end: HTTP, controller, worker, and back into the trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lamina.bootstrap import open_local
from lamina.gateway.bootstrap import GatewayObservers, open_gateway
from lamina.gateway.observability.function_logs import FunctionLogs
from lamina.gateway.observability.tracer import Span, Tracer, parse_traceparent
from tests.serving import Browser, run, write_app

pytestmark = pytest.mark.live

HEADER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
APP = """
import lamina
app = lamina.App("told")

@app.function(slo="20s"{gpu})
def tell(x):
    here = lamina.context()
    with here.span("outer", size=3):
        with here.span("inner"):
            print("working on", x)
    return [here.call_id, here.function, here.tenant, here.traceparent, here.remaining_ms() < 60_000]
"""


def told(tmp_path: Path, header: str, gpu: str) -> tuple[Any, list[Span], str, list[tuple[str, ...]]]:
    spans: list[Span] = []
    output = FunctionLogs()

    async def work() -> tuple[Any, str]:
        live = open_local(str(write_app(tmp_path, APP.format(gpu=", gpu=lamina.GPU(0.5)" if gpu != "no" else ""))), gpu=gpu)
        live.driver.engine.shared.subscribe_output(output.add)
        gateway = await open_gateway(live, observers=GatewayObservers(tracer=Tracer(spans.append, seed=1)))
        try:
            async with Browser(gateway.port) as browser:
                answer = await browser.post("/v1/functions/tell", 1, Traceparent=header)
                return answer.json, answer.headers["lamina-call-id"]
        finally:
            await gateway.stop(5)

    said, call_id = run(work)
    return said, spans, call_id, [line.calls for lines in output._lines.values() for line in lines if line.text == "working on 1"]


@pytest.mark.parametrize("gpu", ["no", "null"])
def test_a_function_knows_its_call_and_its_parts_are_children_of_its_step(tmp_path: Path, gpu: str) -> None:
    said, spans, call_id, _ = told(tmp_path, HEADER, gpu)
    call_id_inside, function, tenant, traceparent, has_deadline = said
    assert (call_id_inside, function, tenant, has_deadline) == (call_id, "tell", "", True)
    carried = parse_traceparent(traceparent.encode())
    by_name = {span.name: span for span in spans if not span.is_call}
    assert carried is not None and carried.span_id == by_name["tell"].span_id
    assert by_name["outer"].parent_id == by_name["tell"].span_id and by_name["outer"].attributes == {"size": 3}
    assert by_name["inner"].parent_id == by_name["outer"].span_id
    step, outer = by_name["tell"], by_name["outer"]
    assert step.begin_us <= outer.begin_us <= outer.end_us <= step.end_us
    assert by_name["tell"].attributes["lamina.call.id"] == call_id


def test_a_call_that_is_not_traced_leaves_no_spans_and_is_told_of_none(tmp_path: Path) -> None:
    said, spans, _, _ = told(tmp_path, HEADER[:-1] + "0", "no")
    assert said[3] == "" and not spans


@pytest.mark.parametrize("gpu", ["no", "null"])
def test_what_it_prints_is_known_by_its_call(tmp_path: Path, gpu: str) -> None:
    _, _, call_id, lines = told(tmp_path, HEADER, gpu)
    assert lines == [(call_id,)]


def test_a_function_that_brings_opentelemetry_continues_the_trace(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry")
    app = write_app(
        tmp_path,
        "import lamina\nfrom opentelemetry import trace\napp = lamina.App('o')\n"
        "@app.function()\ndef f(x):\n    here = trace.get_current_span().get_span_context()\n"
        "    return [format(here.trace_id, '032x'), format(here.span_id, '016x'), lamina.context().traceparent]\n",
    )

    async def work() -> Any:
        gateway = await open_gateway(open_local(str(app)), observers=GatewayObservers(tracer=Tracer(lambda span: None)))
        try:
            async with Browser(gateway.port) as browser:
                return (await browser.post("/v1/functions/f", 1, Traceparent=HEADER)).json
        finally:
            await gateway.stop(5)

    trace_id, span_id, traceparent = run(work)
    assert traceparent == f"00-{trace_id}-{span_id}-01"
    assert trace_id == HEADER[3:35]
