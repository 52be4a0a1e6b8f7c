"""Who asks, and what they may do. Routes ask `Api.allow`; who decides is behind it."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Scope = Literal["invoke", "deploy", "read", "admin"]
ALL: frozenset[Scope] = frozenset(("invoke", "deploy", "read", "admin"))


class Caller(Struct, frozen=True):
    tenant: str = ""  #: "": whoever runs this server
    name: str = "local"  #: for the audit log
    scopes: frozenset[Scope] = ALL


LOCAL = Caller()
