"""The asyncio client: calls share a pool of open connections, one call at a time on each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, TypeVar

from lamina.errors import LaminaError
from lamina.sdk import client_codec
from lamina.sdk.async_connection_pool import AsyncConnectionPool
from lamina.sdk.binding import NOTHING
from lamina.sdk.client_codec import CallResult, ClientRequest, ClientResponse
from lamina.sdk.client_protocol import ClientProtocol, Exchange, resume
from lamina.sdk.resources import checked_int
from lamina.sdk.run_handles import AsyncRunHandle, RunStatus, longest_poll_ms, run_request, status_of
from lamina.sdk.stream_codec import ACCEPT_STREAM

T = TypeVar("T")


class AsyncClient:
    """Asyncio client: `async with AsyncClient("http://127.0.0.1:8700") as client`. Belongs to the loop it is first used on."""

    def __init__(
        self, url: str | None = None, *, token: str | None = None, timeout: str = "60s", max_connections: int = 256
    ) -> None:
        self.server = client_codec.server_at(url, token)
        most = checked_int(max_connections, "max_connections", 1)
        self._connections = AsyncConnectionPool(self.server, timeout, most)
        self.poll_ms = longest_poll_ms(timeout)
        self._protocol = ClientProtocol(self.server)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._connections.close()

    # ------------------------------------------------------------------ calls

    async def call(
        self,
        name: str,
        inputs: Mapping[str, Any] | None = None,
        *,
        deadline: str | None = None,
        priority: int = 0,
        cost_limit: float = 0.0,
        kind: str = "",
    ) -> Any:
        """The result of a function or workflow for named inputs. Without `kind`, either is looked for."""
        answer = await self._answer(name, inputs, deadline, priority, cost_limit, kind)
        if isinstance(answer, LaminaError):
            raise answer
        return answer.value

    async def call_detailed(
        self,
        name: str,
        inputs: Mapping[str, Any] | None = None,
        *,
        deadline: str | None = None,
        priority: int = 0,
        cost_limit: float = 0.0,
        kind: str = "",
    ) -> CallResult:
        """As `call`, with latency, batch, slice and cost of the call."""
        answer = await self._answer(name, inputs, deadline, priority, cost_limit, kind)
        if isinstance(answer, LaminaError):
            raise answer
        return answer

    async def _answer(
        self,
        name: str,
        inputs: Mapping[str, Any] | None,
        deadline: str | None,
        priority: int,
        cost_limit: float,
        kind: str,
    ) -> CallResult | LaminaError:
        try:
            return await self._drive(self._protocol.call(name, inputs, deadline, priority, cost_limit, kind))
        except LaminaError as error:
            return error.with_traceback(None)

    async def stream(
        self,
        name: str,
        inputs: Mapping[str, Any] | None = None,
        *,
        deadline: str | None = None,
        priority: int = 0,
        cost_limit: float = 0.0,
        kind: str = "",
    ) -> AsyncIterator[Any]:
        """What a function yields, item by item as it comes; of anything else the result is the only item. The request is sent
        when the first item is asked for. Closing the iterator cancels the call: the function is closed at its next `yield`."""
        talk = self._protocol.call(name, inputs, deadline, priority, cost_limit, kind, more=ACCEPT_STREAM)
        request = next(talk)
        while True:
            async with self._connections.stream(request) as (response, pieces):
                answer = resume(talk, response)
                if isinstance(answer, LaminaError):
                    raise answer
                if isinstance(answer, ClientRequest):
                    request = answer
                    continue
                if pieces is None:
                    yield answer.value
                    return
                async for piece in pieces:
                    yield piece
                return

    async def start(
        self,
        name: str,
        inputs: Mapping[str, Any] | None = None,
        *,
        deadline: str | None = None,
        priority: int = 0,
        cost_limit: float = 0.0,
        kind: str = "",
        idempotency_key: str = "",
    ) -> AsyncRunHandle:
        """Start a durable run: it survives this process, and the server's. The same key starts the same run once."""
        id = await self._drive(self._protocol.start(name, inputs, deadline, priority, cost_limit, kind, idempotency_key))
        if isinstance(id, LaminaError):
            raise id
        return AsyncRunHandle(self, id)

    def run(self, id: str) -> AsyncRunHandle:
        """The durable run of that id, started by any client."""
        return AsyncRunHandle(self, id)

    async def runs(self, *, target: str = "", state: str = "") -> AsyncIterator[RunStatus]:
        """All durable runs, the newest first, read page by page as they are asked for."""
        before = ""
        while True:
            page = await self.ask(run_request(self.server, "", "", query={"target": target, "state": state, "before": before}))
            for shown in page["runs"]:
                yield status_of(shown)
            before = page["next"] or ""
            if not before:
                return

    # ------------------------------------------------------------------ reads

    async def functions(self) -> Any:
        """The list at /v1/functions."""
        return await self._read("/v1/functions")

    async def workflows(self) -> Any:
        return await self._read("/v1/workflows")

    async def health(self) -> Any:
        return await self._read("/healthz")

    async def bind(self, name: str, body: Any = NOTHING) -> dict[str, Any]:
        """Named inputs for a JSON body, by asking the server which parameters `name` has."""
        named = await self._drive(self._protocol.bind(name, body))
        if isinstance(named, LaminaError):
            raise named
        return named

    async def _read(self, path: str) -> Any:
        return await self.ask(client_codec.read_request(self.server, path))

    async def ask(self, request: ClientRequest) -> Any:
        """Send a request and decode its response; an error is raised."""
        answer = client_codec.result_of(await self.send(request))
        if isinstance(answer, LaminaError):
            raise answer
        return answer.value

    async def send(self, request: ClientRequest) -> ClientResponse:
        return await self._connections.send(request)

    async def _drive(self, talk: Exchange[T]) -> T:
        """Drive an exchange to its end."""
        said: ClientRequest | T = next(talk)
        while isinstance(said, ClientRequest):
            said = resume(talk, await self._connections.send(said))
        return said
