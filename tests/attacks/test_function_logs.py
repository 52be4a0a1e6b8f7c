"""Function logs: what one tenant prints pushes out nothing of another, and is not more than can be told at once."""

from __future__ import annotations

from typing import Any

from lamina.access.authorization import AccessRule, Grant
from lamina.access.records import Identity
from lamina.gateway.observability import function_logs
from lamina.gateway.observability.function_logs import FunctionLogs
from lamina.server.exchange import HttpRequest


class Reader:
    """What a client is sent."""

    def __init__(self) -> None:
        self.said = b""

    def start_stream(self, *_: Any) -> None: ...

    def end_stream(self) -> None: ...

    def send_chunk(self, piece: bytes) -> None:
        self.said += piece


def read(logs: FunctionLogs, tenant: str) -> bytes:
    reader: Any = Reader()
    grant = Grant(Identity(tenant=tenant), AccessRule("read", "own"))
    logs.serve(HttpRequest("GET", b"/v1/logs", b"tail=10000", {}, b"", True), reader, {"f"}, grant)
    said: bytes = reader.said
    return said


def test_a_tenant_that_prints_without_end_pushes_out_nothing_of_another() -> None:
    logs = FunctionLogs(lambda function: function)
    logs.add("acme", "acme-1", (), "mine")
    for number in range(20_000):
        logs.add("evil", "evil-1", (), f"{number} {'x' * 5_000}")
    assert b"mine" in read(logs, "acme") and b"xxx" not in read(logs, "acme")
    assert b"19999 xx" in read(logs, "evil") and len(read(logs, "evil")) < 8 * 2**20
    assert read(logs, "").index(b"mine") < read(logs, "").index(b"19999 xx")  # of the operator, in their order


def test_of_many_tenants_the_one_with_the_most_gives_way() -> None:
    logs = FunctionLogs(lambda function: function)
    logs.add("quiet", "quiet-1", (), "mine")
    for number in range(2_000):
        for tenant in ("a", "b", "c"):
            logs.add(tenant, "x-1", (), f"{number} {'x' * 4_000}")
    assert logs._total <= function_logs.TOTAL_COST and logs._total == logs._costs.total()
    assert b"mine" in read(logs, "quiet") and all(b"1999 xx" in read(logs, tenant) for tenant in "abc")
