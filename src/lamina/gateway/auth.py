"""Authentication and authorization: a token in `Authorization: Bearer ...`, and nowhere else (an address is written into logs).

On loopback alone no token is needed. A wrong token is rejected there too: a client that sends one means it.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Callable, Mapping

import msgspec

from lamina.access.access_control import AccessControl
from lamina.access.authorization import AccessRule
from lamina.access.records import Identity
from lamina.core.events import TenantUpdated
from lamina.drivers.realtime import RealtimeDriver
from lamina.errors import BadValue, LaminaError, Unauthorized
from lamina.server.exchange import HttpRequest
from lamina.server.origins import is_loopback
from lamina.types import Tenant

Authorize = Callable[[HttpRequest, AccessRule], Identity]
"""The identity behind a request, if the rule of its route lets it in; raises `Unauthorized` or `Forbidden`."""

LOCAL = Identity()
"""The local user of a server that needs no token."""

_BEARER = b"bearer "
MAX_TOKEN_BYTES = 512


class Authenticator:
    """Authenticates requests and checks them against the rule of their route. Pages of other origins do not come this far
    (`server/origins.py`)."""

    def __init__(self, access: AccessControl | None = None, *, requires_token: bool = False) -> None:
        self._access = access
        self.requires_token = requires_token
        self._own_header = b"Bearer " + secrets.token_urlsafe(32).encode()  #: of requests that this server makes of itself

    def authorize(self, request: HttpRequest, rule: AccessRule) -> Identity:
        """The identity behind a request, if the rule of its route lets it in; raises `Unauthorized` or `Forbidden`."""
        header = request.headers.get(b"authorization")
        if rule.reach == "public":
            return LOCAL
        if header is None and not self.requires_token and rule.reach != "token":
            return LOCAL
        if header is not None and hmac.compare_digest(header, self._own_header):
            return LOCAL
        identity = self.authenticate(header)
        rule.check_identity(identity)
        return identity

    def own_request(self, request: HttpRequest) -> HttpRequest:
        """A request of the operator's own, which needs no token."""
        if b"authorization" in request.headers:
            return request
        return msgspec.structs.replace(request, headers={**request.headers, b"authorization": self._own_header})

    def check_any_head(self, headers: Mapping[bytes, bytes], then: Callable[[str | LaminaError], None]) -> None:
        """As `check_head`, where web apps have tokens of their own: a body of an unknown client counts for its address alone."""
        self.check_head(headers, lambda found: then("" if isinstance(found, LaminaError) else found))

    def check_head(self, headers: Mapping[bytes, bytes], then: Callable[[str | LaminaError], None]) -> None:
        """Authenticate a request whose body is still to come: `then` gets its tenant, or the error. Its scope is checked when the
        request is whole, with everything else."""
        header = headers.get(b"authorization")
        found: str | LaminaError = ""
        if header is not None or self.requires_token:
            try:
                found = self.authenticate(header).tenant
            except LaminaError as error:
                found = error
        then(found)

    def authenticate(self, header: bytes | None) -> Identity:
        """The identity of a token."""
        if header is None:
            raise Unauthorized("no token", hint="send Authorization: Bearer TOKEN")
        if header[:7].lower() != _BEARER or len(header) > MAX_TOKEN_BYTES:
            raise Unauthorized("authorization: not a bearer token", hint="send Authorization: Bearer TOKEN")
        if self._access is None:
            raise Unauthorized("unknown token", hint="this server has none: start it with --store")
        return self._access.authenticate(header[7:].strip().decode("latin-1"))


def check_host(host: str, access: AccessControl | None = None) -> bool:
    """May the server listen there? A port that others can reach needs tokens. Returns whether tokens are required."""
    if is_loopback(host):
        return False
    if access is None:
        raise BadValue(
            f"host: {host!r} is not a loopback address, and without a store there are no tokens",
            hint="leave out --store none, or name a store: LAMINA_TOKEN counts with one; or serve without any token: --no-auth",
        )
    if not access.usable_tokens():
        raise BadValue(
            f"host: {host!r} is not a loopback address, and there is no token",
            hint="set LAMINA_TOKEN to one of your own; or make one (lamina token create NAME --store PATH) and serve with that "
            "store; or serve without any: --no-auth",
        )
    return True


SAVE_EVERY_S = 30.0


def sync_tenant_limits(access: AccessControl, loop: RealtimeDriver) -> None:
    """Sync tenant limits to the controller, now and after every change; usage of the day survives a restart."""
    post, books = loop.post, loop.controller.usage
    told: dict[str, Tenant] = {}

    def tell() -> None:
        for name in told.keys() - access.tenants.keys():
            del told[name]
            post(TenantUpdated(Tenant(name=name)))
        for name, tenant in access.tenants.items():
            if told.get(name) != tenant:
                told[name] = tenant
                post(TenantUpdated(tenant, access.daily_usage.pop(name, 0.0)))

    def save() -> None:
        asyncio.get_running_loop().call_later(SAVE_EVERY_S, save)  # first: it goes on, whatever becomes of this time
        limited = [name for name, tenant in access.tenants.items() if tenant.unit_s_per_day]
        access.save_usage({name: books.account(name).day.total_us for name in limited})

    access.on_change.append(tell)
    tell()
    asyncio.get_running_loop().call_later(SAVE_EVERY_S, save)
