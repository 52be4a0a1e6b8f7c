"""Sans-IO client protocol: the requests of each client operation and the meaning of their responses, for both clients.

Each exchange is a generator. It yields a request, is sent the response, and returns the result; a transport drives it.
Errors are returned and not raised: the method the user called raises them, without the frames in between.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, TypeVar

from lamina.errors import BadValue, LaminaError, UnknownTarget
from lamina.sdk import wire
from lamina.sdk.binding import Param, bind
from lamina.sdk.runs import key_of, start_request, started
from lamina.sdk.wire import Answer, Request, Response, Server

T = TypeVar("T")
Talk = Generator[Request, Response, T]

Inputs = Mapping[str, Any] | None


def further(talk: Talk[T], response: Response) -> Request | T:
    """The next request of an exchange, or its result."""
    try:
        return talk.send(response)
    except StopIteration as end:
        result: T = end.value
        return result


class Talks:
    def __init__(self, server: Server) -> None:
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
    ) -> Talk[Answer | LaminaError]:
        """Call a function or workflow. `more`: headers besides the usual ones."""
        for guess in self._guesses(name, kind):
            request = wire.call_request(self._server, guess, name, inputs, deadline, priority, cost_limit)
            request.headers.update(more or {})
            answer = wire.answer_of((yield request))
            if not isinstance(answer, UnknownTarget):
                self._kinds[name] = guess
                return answer
        return self._unknown(name)

    def start(
        self, name: str, inputs: Inputs, deadline: str | None, priority: int, cost_limit: float, kind: str, key: str
    ) -> Talk[str | LaminaError]:
        """Start a durable run: its id."""
        key = key_of(key)
        for guess in self._guesses(name, kind):
            request = start_request(self._server, guess, name, inputs, deadline, priority, cost_limit, key)
            id = started(self._server, name, (yield request))
            if isinstance(id, LaminaError):
                return id
            if id is not None:
                self._kinds[name] = guess
                return id
        return self._unknown(name)

    def bind(self, name: str, body: Any) -> Talk[dict[str, Any] | LaminaError]:
        """Named inputs for a JSON body, by the parameters that `name` has at the server."""
        known: dict[str, Any] = {}
        for kind in wire.KINDS:
            answer = wire.answer_of((yield wire.read_request(self._server, f"/v1/{kind}")))
            if isinstance(answer, LaminaError):
                return answer
            known |= {about["name"]: (kind, about["inputs"]) for about in answer.value}
        if name not in known:
            return wire.unknown(self._server, name, list(known))
        self._kinds[name], inputs = known[name]
        return bind([Param(one["name"], one["required"]) for one in inputs], body)

    def _guesses(self, name: str, kind: str) -> tuple[str, ...]:
        if kind and kind not in wire.KINDS:
            raise BadValue(f"kind: {kind!r} is none", hint=f"leave it out, or give one of {', '.join(wire.KINDS)}")
        kind = kind or self._kinds.get(name, "")
        return (kind,) if kind else wire.KINDS

    def _unknown(self, name: str) -> UnknownTarget:
        self._kinds.pop(name, None)
        return wire.unknown(self._server, name)
