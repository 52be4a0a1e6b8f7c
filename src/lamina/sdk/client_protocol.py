"""Sans-IO client protocol: the requests of each client operation and the meaning of their responses, for both clients.

Each exchange is a generator. It yields a request, is sent the response, and returns the result; a transport drives it.
Errors are returned and not raised: the method the user called raises them, without the frames in between.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, TypeVar

from lamina.errors import BadValue, LaminaError, UnknownTarget
from lamina.sdk import client_codec
from lamina.sdk.binding import Param, bind
from lamina.sdk.client_codec import CallResult, ClientRequest, ClientResponse, ServerAddress
from lamina.sdk.run_handles import idempotency_key, start_request, started_run

T = TypeVar("T")
Exchange = Generator[ClientRequest, ClientResponse, T]

Inputs = Mapping[str, Any] | None


def resume(talk: Exchange[T], response: ClientResponse) -> ClientRequest | T:
    """The next request of an exchange, or its result."""
    try:
        return talk.send(response)
    except StopIteration as end:
        result: T = end.value
        return result


class ClientProtocol:
    def __init__(self, server: ServerAddress) -> None:
        self._server = server
        self._kinds: dict[str, str] = {}  #: what a name turned out to be

    def call(
        self,
        name: str,
        inputs: Inputs,
        deadline: str | None,
        priority: int,
        cost_limit: float,
        kind: str,
        *,
        more: Mapping[str, str] | None = None,
    ) -> Exchange[CallResult | LaminaError]:
        """Call a function or workflow. `more`: headers besides the usual ones."""
        for guess in self._kinds_to_try(name, kind):
            request = client_codec.call_request(self._server, guess, name, inputs, deadline, priority, cost_limit)
            request.headers.update(more or {})
            answer = client_codec.result_of((yield request))
            if not isinstance(answer, UnknownTarget):
                self._kinds[name] = guess
                return answer
        return self._unknown(name)

    def start(
        self, name: str, inputs: Inputs, deadline: str | None, priority: int, cost_limit: float, kind: str, key: str
    ) -> Exchange[str | LaminaError]:
        """Start a durable run: its id."""
        key = idempotency_key(key)
        for guess in self._kinds_to_try(name, kind):
            request = start_request(self._server, guess, name, inputs, deadline, priority, cost_limit, key)
            id = started_run(self._server, name, (yield request))
            if isinstance(id, LaminaError):
                return id
            if id is not None:
                self._kinds[name] = guess
                return id
        return self._unknown(name)

    def bind(self, name: str, body: Any) -> Exchange[dict[str, Any] | LaminaError]:
        """Named inputs for a JSON body, by the parameters that `name` has at the server."""
        known: dict[str, Any] = {}
        for kind in client_codec.KINDS:
            answer = client_codec.result_of((yield client_codec.read_request(self._server, f"/v1/{kind}")))
            if isinstance(answer, LaminaError):
                return answer
            known |= {about["name"]: (kind, about["inputs"]) for about in answer.value}
        if name not in known:
            return client_codec.unknown_target(self._server, name, list(known))
        self._kinds[name], inputs = known[name]
        return bind([Param(one["name"], one["required"]) for one in inputs], body)

    def _kinds_to_try(self, name: str, kind: str) -> tuple[str, ...]:
        if kind and kind not in client_codec.KINDS:
            raise BadValue(f"kind: {kind!r} is none", hint=f"leave it out, or give one of {', '.join(client_codec.KINDS)}")
        kind = kind or self._kinds.get(name, "")
        return (kind,) if kind else client_codec.KINDS

    def _unknown(self, name: str) -> UnknownTarget:
        self._kinds.pop(name, None)
        return client_codec.unknown_target(self._server, name)
