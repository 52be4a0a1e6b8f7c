"""Identity of a client: tenant, name and scopes. Routes get it from `Router.authorize`."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Scope = Literal["invoke", "deploy", "read", "admin"]
ALL: frozenset[Scope] = frozenset(("invoke", "deploy", "read", "admin"))


class CallerIdentity(Struct, frozen=True):
    """An authenticated client, or the local user of a server that needs no token."""

    tenant: str = ""  #: "": the operator of this server
    name: str = "local"  #: for the audit log
    scopes: frozenset[Scope] = ALL


LOCAL_CALLER = CallerIdentity()
