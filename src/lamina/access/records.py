"""Records of users, tokens, secrets and the audit log. Nothing here is a credential: of passwords, codes and tokens there are
only hashes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal, get_args

import msgspec
from msgspec import Struct

from lamina.errors import BadValue
from lamina.types import Tenant

Scope = Literal["invoke", "deploy", "read", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
MAX_SECRET_CHARS = 65_536


class Identity(Struct, frozen=True):
    """Identity of an authenticated caller."""

    tenant: str = ""  #: "": the operator of this server
    name: str = "local"
    scopes: frozenset[Scope] = frozenset(SCOPES)


class Person(Struct, frozen=True, kw_only=True):
    name: str
    tenant: str
    scopes: tuple[Scope, ...]
    created_us: int  #: since 1970, as all times here
    password: str = ""  #: argon2; "": invited, and has not signed up yet
    code: str = ""  #: digest of what to sign up with
    code_until_us: int = 0


class Token(Struct, frozen=True, kw_only=True):
    id: str
    digest: str
    name: str
    tenant: str
    scopes: tuple[Scope, ...]
    created_us: int
    created_by: str
    expires_us: int

    def identity(self) -> Identity:
        return Identity(self.tenant, f"token {self.name} ({self.id})", frozenset(self.scopes))


class Secret(Struct, frozen=True, kw_only=True):
    tenant: str
    name: str
    changed_us: int
    sealed: str = ""  #: as `vault.Vault` makes it

    @property
    def owner(self) -> str:
        return f"{self.tenant}/{self.name}"


class AuditEntry(Struct, frozen=True, kw_only=True):
    """Entry of the audit log."""

    at_us: int
    actor: str = msgspec.field(name="who")  #: name of the caller
    tenant: str
    what: str
    subject: str = ""
    ok: bool = True
    note: str = ""


def checked_name(name: object, field: str) -> str:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise BadValue(
            f"{field}: {str(name)[:80]!r} cannot be used", hint="up to 63 of a-z 0-9 . _ - and a letter or digit first"
        )
    return name


def checked_scopes(scopes: Iterable[str]) -> tuple[Scope, ...]:
    given = list(scopes)
    for scope in given:
        if scope not in SCOPES:
            raise BadValue(f"scopes: {str(scope)[:40]!r} is none", hint=f"there are {', '.join(SCOPES)}")
    if not given:
        raise BadValue("scopes: none given", hint=f"some of {', '.join(SCOPES)}")
    return tuple(scope for scope in SCOPES if scope in given)


def checked_tenant(tenant: Tenant) -> Tenant:
    checked_name(tenant.name, "tenant")
    if not 0.001 <= tenant.weight <= 1_000:
        raise BadValue(f"weight: {tenant.weight:g} is not from 0.001 to 1000", hint="1 is usual")
    for field in ("rate_per_s", "burst", "concurrent", "unit_s_per_day", "memory_mib"):
        value = getattr(tenant, field)
        if not 0 <= value <= 1e15:
            raise BadValue(f"{field}: {value:g} is not from 0 on", hint="0: no limit")
    return tenant
