"""Administration service: what an administrator can do, in one place for the command line and for HTTP.

An administrator of a tenant manages that tenant; one of none ("") manages all, and alone sets limits.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from secrets import token_hex
from typing import Any

import msgspec

from lamina.access import access_store, passwords
from lamina.access.access_control import OPERATOR, AccessControl
from lamina.access.authorization import Grant, rule_of
from lamina.access.records import (
    MAX_SECRET_CHARS,
    Identity,
    Person,
    Secret,
    Token,
    checked_name,
    checked_scopes,
    checked_tenant,
)
from lamina.errors import BadValue, Forbidden, NotFound
from lamina.types import Tenant
from lamina.units import parse_us

Params = Mapping[str, Any]
MAX_TOKEN_LIFE_US = 10 * 365 * 86_400_000_000
INVITATION_LIFE_US = 7 * 86_400_000_000


class AdminService:
    def __init__(self, access: AccessControl) -> None:
        self._access = access
        self.actions: dict[str, Callable[[Grant, Params], Awaitable[Any]]] = {
            "token/create": self._token_create,
            "token/list": self._token_list,
            "token/revoke": self._token_revoke,
            "tenant/set": self._tenant_set,
            "tenant/list": self._tenant_list,
            "tenant/remove": self._tenant_remove,
            "user/invite": self._user_invite,
            "user/list": self._user_list,
            "user/remove": self._user_remove,
            "secret/set": self._secret_set,
            "secret/list": self._secret_list,
            "secret/remove": self._secret_remove,
            "audit/list": self._audit_list,
        }

    async def perform(self, caller: Identity, what: str, params: Params) -> Any:
        action = self.actions.get(what)
        if action is None:
            raise NotFound(f"nothing called {what[:60]!r} can be done here", hint=f"there is {', '.join(self.actions)}")
        rule = rule_of("management", f"POST /v1/admin/{what}")
        rule.check_identity(caller)
        return await action(Grant(caller, rule), params)

    # -------------------------------------------------------------------- tokens

    async def _token_create(self, grant: Grant, params: Params) -> Any:
        tenant = self._tenant_of(grant, params)
        name = checked_name(params.get("name", "token"), "name")
        scopes = checked_scopes(params.get("scopes", ["invoke", "read"]))
        now_us = self._access.now_us()
        life_us = parse_us(str(params.get("expires", "30d")), "expires")
        if not 0 < life_us <= MAX_TOKEN_LIFE_US:
            raise BadValue(f"expires: {params.get('expires')!r} is not a time from now on", hint="such as 30d")
        text = passwords.random_token("lmt")
        token = Token(
            id=token_hex(4),
            digest=passwords.digest(text),
            name=name,
            tenant=tenant,
            scopes=scopes,
            created_us=now_us,
            created_by=grant.caller.name,
            expires_us=now_us + life_us,
        )
        await self._access.write_audited(
            grant.caller,
            "token/create",
            token.id,
            lambda db: access_store.add(db, token, token.id, now_us),
            f"{tenant}: {' '.join(scopes)}",
        )
        return {**_token_view(token), "token": text}

    async def _token_list(self, grant: Grant, params: Params) -> Any:
        return [_token_view(token) for token in self._access.tokens.values() if grant.sees(token.tenant)]

    async def _token_revoke(self, grant: Grant, params: Params) -> Any:
        token_id = str(params.get("id", ""))
        found = [token for token in self._access.tokens.values() if token.id == token_id and grant.sees(token.tenant)]
        if not found:
            raise NotFound(f"no token {token_id[:40]!r}", hint="lamina token list")
        if token_id == OPERATOR:
            raise BadValue(
                "the operator's token is not in the store", hint="change --operator-token-file, and start the server again"
            )
        await self._access.write_audited(
            grant.caller, "token/revoke", token_id, lambda db: access_store.remove(db, Token, token_id)
        )
        return {"revoked": token_id}

    # ------------------------------------------------------------------- tenants

    async def _tenant_set(self, grant: Grant, params: Params) -> Any:
        try:
            tenant = checked_tenant(msgspec.convert(dict(params), Tenant))
        except msgspec.ValidationError as error:
            raise BadValue(f"tenant: {error}") from None
        now_us = self._access.now_us()
        limits = msgspec.json.encode(tenant).decode()
        await self._access.write_audited(
            grant.caller, "tenant/set", tenant.name, lambda db: access_store.put(db, tenant, tenant.name, now_us), limits
        )
        return msgspec.to_builtins(tenant)

    async def _tenant_list(self, grant: Grant, params: Params) -> Any:
        return [msgspec.to_builtins(tenant) for tenant in self._access.tenants.values() if grant.sees(tenant.name)]

    async def _tenant_remove(self, grant: Grant, params: Params) -> Any:
        """Remove a tenant with its tokens and users: no credentials are left that could call in its name."""
        name = checked_name(params.get("name"), "name")
        tokens = [token.id for token in self._access.tokens.values() if token.tenant == name]
        people = [person.name for person in self._access.people.values() if person.tenant == name]

        def work(db: Any) -> None:
            access_store.remove(db, Tenant, name)
            for token_id in tokens:
                access_store.remove(db, Token, token_id)
            for person in people:
                access_store.remove(db, Person, person)

        await self._access.write_audited(grant.caller, "tenant/remove", name, work)
        for person in people:
            self._access.end_sessions(person)
        return {"removed": name, "tokens": len(tokens), "people": len(people)}

    # -------------------------------------------------------------------- people

    async def _user_invite(self, grant: Grant, params: Params) -> Any:
        tenant = self._tenant_of(grant, params)
        name = checked_name(params.get("name"), "name")
        scopes = checked_scopes(params.get("scopes", ["invoke", "read"]))
        now_us = self._access.now_us()
        code = passwords.random_token("lmi")
        person = Person(
            name=name,
            tenant=tenant,
            scopes=scopes,
            created_us=now_us,
            code=passwords.digest(code),
            code_until_us=now_us + INVITATION_LIFE_US,
        )
        await self._access.write_audited(
            grant.caller,
            "user/invite",
            name,
            lambda db: access_store.add(db, person, name, now_us),
            f"{tenant}: {' '.join(scopes)}",
        )
        return {**_person_view(person), "code": code}

    async def _user_list(self, grant: Grant, params: Params) -> Any:
        return [_person_view(person) for person in self._access.people.values() if grant.sees(person.tenant)]

    async def _user_remove(self, grant: Grant, params: Params) -> Any:
        name = checked_name(params.get("name"), "name")
        person = self._access.people.get(name)
        if person is None or not grant.sees(person.tenant):
            raise NotFound(f"no user {name!r}", hint="lamina user list")
        await self._access.write_audited(grant.caller, "user/remove", name, lambda db: access_store.remove(db, Person, name))
        self._access.end_sessions(name)
        return {"removed": name}

    # ------------------------------------------------------------------- secrets

    async def _secret_set(self, grant: Grant, params: Params) -> Any:
        tenant = self._tenant_of(grant, params)
        name = checked_name(params.get("name"), "name")
        value = params.get("value")
        if not isinstance(value, str) or not 1 <= len(value) <= MAX_SECRET_CHARS:
            raise BadValue(f"value: not a text of 1 to {MAX_SECRET_CHARS} characters")
        now_us = self._access.now_us()
        await self._access.write(lambda db: None)  # a store makes its folder when it is first used, and the key is kept there
        sealed = self._access.vault.seal(f"{tenant}/{name}", value)
        secret = Secret(tenant=tenant, name=name, sealed=sealed, changed_us=now_us)
        await self._access.write_audited(
            grant.caller, "secret/set", name, lambda db: access_store.put(db, secret, secret.owner, now_us), tenant
        )
        return {"tenant": tenant, "name": name}

    async def _secret_list(self, grant: Grant, params: Params) -> Any:
        """List secrets by name: their values are never shown again."""
        return [
            {"tenant": secret.tenant, "name": secret.name, "changed_us": secret.changed_us}
            for secret in self._access.secrets.values()
            if grant.sees(secret.tenant)
        ]

    async def _secret_remove(self, grant: Grant, params: Params) -> Any:
        tenant = self._tenant_of(grant, params)
        name = checked_name(params.get("name"), "name")
        await self._access.write_audited(
            grant.caller, "secret/remove", name, lambda db: access_store.remove(db, Secret, f"{tenant}/{name}"), tenant
        )
        return {"removed": name}

    # --------------------------------------------------------------------- audit

    async def _audit_list(self, grant: Grant, params: Params) -> Any:
        after, limit = str(params.get("after", "")), params.get("limit", 100)
        if not isinstance(limit, int) or not 1 <= limit <= 1_000:
            raise BadValue(f"limit: {str(limit)[:40]!r} is not from 1 to 1000")
        page = await self._access.read(lambda db: access_store.read_audit(db, after, limit))
        return [{"key": key, **msgspec.to_builtins(action)} for key, action in page if grant.sees(action.tenant)]

    def _tenant_of(self, grant: Grant, params: Params) -> str:
        """Tenant of a new record: the administrator's own, or for one of none, any that exists."""
        tenant = params.get("tenant", grant.tenant)
        if tenant == "" and grant.sees(""):
            return ""
        tenant = checked_name(tenant, "tenant")
        grant.check_owner(tenant, Forbidden(f"{grant.caller.name} administers tenant {grant.tenant!r} alone"))
        if tenant not in self._access.tenants:
            raise NotFound(f"no tenant {tenant!r}", hint=f"make it first: lamina tenant set {tenant}")
        return tenant


def _token_view(token: Token) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(token)
    del shown["digest"]
    return shown


def _person_view(person: Person) -> dict[str, Any]:
    return {
        "name": person.name,
        "tenant": person.tenant,
        "scopes": list(person.scopes),
        "signed_up": bool(person.password),
        "created_us": person.created_us,
    }
