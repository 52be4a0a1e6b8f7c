"""Access control: authentication, sessions, tenants and secrets. Answers come from memory; changes are written first.

One server writes a store at a time, so what it has read when it took the lead, and changed since, is the truth.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from msgspec import Struct

from lamina.access import access_store, passwords
from lamina.access.records import SCOPES, AuditEntry, Identity, Person, Secret, Token
from lamina.access.vault import Vault
from lamina.errors import BadValue, LaminaError, Refused, StoreDown, Unauthorized
from lamina.store.base import Session, Store, Work
from lamina.types import Tenant

log = logging.getLogger("lamina")

T = TypeVar("T")

SESSION_S = 1_800
"""Lifetime of login sessions: long enough for a piece of work, short enough to be lost."""

MAX_SESSIONS = 10_000
DAY_US = 86_400_000_000
CONCURRENT_HASHES = 2
"""Password hashes computed at the same time: each takes a core and 64 MiB."""


FREE_TRIES = 5
MAX_WAIT_S = 300
MAX_NAMES = 10_000
MAX_TRIES = 4
"""Wrong passwords without a wait, the longest wait after more of them, the names that are remembered, and tries of an address at
the same time."""


OPERATOR = "operator"
"""Id and name of the token that is kept outside the store."""

MIN_OPERATOR_CHARS = 20
OPERATOR_LIFE_US = 3_650 * DAY_US


class LoginSession(Struct, frozen=True):
    """Login session of a user, with its end."""

    identity: Identity
    until_us: int


def wall_us() -> int:
    return time.time_ns() // 1_000


class LoginThrottle:
    """Exponential backoff after wrong passwords, per user name and address: one that guesses keeps itself out, and not the user.
    An address has a few tries under way at a time, because each takes a core for a while."""

    def __init__(self) -> None:
        self._failed: dict[tuple[str, str], tuple[int, int]] = {}  #: how often in a row, and when next
        self._tries: Counter[str] = Counter()  #: under way, by address

    @contextmanager
    def trying(self, name: str, address: str, now_us: int) -> Iterator[None]:
        """A try; raises `Refused` where it is not its time."""
        _, until_us = self._failed.get((name, address), (0, 0))
        if now_us < until_us:
            wait_s = (until_us - now_us) / 1e6
            raise Refused("too many wrong tries", reason="tries", retry_after_s=wait_s, hint=f"wait {wait_s:.0f} s")
        if self._tries[address] >= MAX_TRIES:
            raise Refused("too many tries at once", reason="tries", retry_after_s=1.0, hint="one after another")
        self._tries[address] += 1
        try:
            yield
        finally:
            self._tries -= Counter((address,))

    def failed(self, name: str, address: str, now_us: int) -> None:
        key = name, address
        count = self._failed.pop(key, (0, 0))[0] + 1
        wait_s = min(MAX_WAIT_S, 2 ** (count - FREE_TRIES)) if count >= FREE_TRIES else 0
        while len(self._failed) >= MAX_NAMES:
            del self._failed[next(iter(self._failed))]
        self._failed[key] = (count, now_us + wait_s * 1_000_000)

    def succeeded(self, name: str, address: str) -> None:
        self._failed.pop((name, address), None)


class AccessControl:
    """Users, tokens, tenants and secrets of a server, in memory and in its store."""

    def __init__(self, store: Store, now_us: Callable[[], int] = wall_us, *, operator_token: str = "") -> None:
        """`operator_token`: a token with all scopes that is kept outside the store: the first one of a server in a container, and
        one that is known while the store is away."""
        self._store = store
        self.vault = Vault(store.folder)
        self.now_us = now_us
        self.people: dict[str, Person] = {}
        self._operator = [_operator_record(operator_token, now_us())] if operator_token else []
        self.tokens: dict[str, Token] = {token.digest: token for token in self._operator}  #: by digest
        self.tenants: dict[str, Tenant] = {}
        self.secrets: dict[str, Secret] = {}
        self._sessions: dict[str, LoginSession] = {}
        self._throttle = LoginThrottle()
        self._hashing = asyncio.Semaphore(CONCURRENT_HASHES)
        self._loaded = False
        self.on_change: list[Callable[[], None]] = []  #: called after every change
        self.daily_usage: dict[str, float] = {}  #: units x microseconds of tenants with a daily limit, as saved before this start

    async def load(self, *, afresh: bool = False) -> None:
        """Load all there is. With `afresh` also the usage of the day, as at the first time: another server has led since."""

        def work(db: Session) -> tuple[dict[str, Person], dict[str, Token], dict[str, Tenant], dict[str, Secret]]:
            return (
                access_store.read_all(db, Person),
                access_store.read_all(db, Token),
                access_store.read_all(db, Tenant),
                access_store.read_all(db, Secret),
            )

        self.people, tokens, self.tenants, self.secrets = await self.read(work)
        self.tokens = {token.digest: token for token in (*tokens.values(), *self._operator)}
        if afresh or not self._loaded:
            self._loaded = True
            self.daily_usage = await self.read(lambda db: access_store.read_usage(db, self.now_us() - DAY_US))
        for tell in self.on_change:
            tell()

    async def user_of(self, tenant: str, users: tuple[int, int]) -> int:
        """User of the machine that a tenant's functions run as."""
        now_us = self.now_us()
        return await self.write(lambda db: access_store.tenant_user(db, tenant, users, now_us))

    def usable_tokens(self) -> int:
        now_us = self.now_us()
        return sum(token.expires_us > now_us for token in self.tokens.values())

    def environment(self, tenant: str) -> dict[str, str]:
        """Environment variables with the secrets of a tenant, as its functions see them: `LAMINA_SECRET_NAME`."""
        found = {}
        for one in self.secrets.values():
            if one.tenant == tenant:
                try:
                    found[f"LAMINA_SECRET_{re.sub(r'[^A-Z0-9]', '_', one.name.upper())}"] = self.vault.open(one.owner, one.sealed)
                except LaminaError as error:  # a function that needs it will say so; the others can do without
                    log.error("%s", error)
        return found

    def give_secrets(self, engines: Any) -> None:
        """Give secrets to workers started from now on; running ones keep theirs. `engines`: what the engines share."""
        engines.set_environment(self.environment)

    # ---------------------------------------------------------------------- authentication

    def authenticate(self, token: str) -> Identity:
        """Authenticate a token. Looked up by its hash: how long that takes says nothing about the token."""
        digest = passwords.digest(token)
        known = self.tokens.get(digest)
        now_us = self.now_us()
        if known is not None and hmac.compare_digest(known.digest, digest):
            if known.expires_us <= now_us:
                raise Unauthorized("the token has expired", hint="ask for a new one: lamina token create")
            if known.id != OPERATOR and self._store.was_stopped:  # the leader of now may have revoked it
                raise self._outdated()
            return known.identity()
        visit = self._sessions.get(digest)
        if visit is None or visit.until_us <= now_us:
            self._sessions.pop(digest, None)
            if self._store.exists and not self._store.holds_lease:  # the leader may know it
                raise self._outdated()
            raise Unauthorized("unknown token", hint="log in again, or ask for a new one")
        return visit.identity

    def check_current(self) -> None:
        """Raise where there is a store that this server does not lead. One that began before there was a store finds out later
        than its clients that another has made it, and one that was stopped that another has taken the lead."""
        if self._store.exists and (not self._store.term or self._store.was_stopped):
            raise self._outdated()

    def _outdated(self) -> StoreDown:
        return StoreDown("users and tokens may have changed: it is not sure that this server leads its store", hint="try again")

    async def log_in(self, name: str, password: str, address: str = "") -> tuple[str, LoginSession]:
        """Log in with a password: a session token, and its session. `address`: of the client."""
        now_us = self.now_us()
        person = self.people.get(name)
        known = person.password if person is not None else ""
        with self._throttle.trying(name, address, now_us):
            async with self._hashing:
                right = await asyncio.to_thread(passwords.verify, password, known)
        if not right or person is None:
            self._throttle.failed(name, address, now_us)
            if person is not None:  # a name that there is not is no one's, and each would be a row in the store
                self._audit_soon(AuditEntry(at_us=now_us, actor=name, tenant="", what="log-in", subject="", ok=False))
            raise Unauthorized("name or password is wrong", hint="an invited user signs up first")
        self._throttle.succeeded(name, address)
        token = passwords.random_token("lms")
        visit = LoginSession(Identity(person.tenant, person.name, frozenset(person.scopes)), now_us + SESSION_S * 1_000_000)
        while len(self._sessions) >= MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        self._sessions[passwords.digest(token)] = visit
        await self.audit(visit.identity, "log-in")
        return token, visit

    def log_out(self, token: str) -> None:
        self._sessions.pop(passwords.digest(token), None)

    def end_sessions(self, name: str) -> None:
        self._sessions = {key: visit for key, visit in self._sessions.items() if visit.identity.name != name}

    async def sign_up(self, name: str, password: str, code: str, address: str = "") -> None:
        """Sign up with the code of an invitation, once. `address`: of the client."""
        now_us = self.now_us()
        with self._throttle.trying(name, address, now_us):
            await self._sign_up(name, password, code, address, now_us)

    async def _sign_up(self, name: str, password: str, code: str, address: str, now_us: int) -> None:
        person = self.people.get(name)
        given = passwords.digest(code)
        if person is None or not person.code or not hmac.compare_digest(person.code, given) or person.code_until_us <= now_us:
            self._throttle.failed(name, address, now_us)
            raise Unauthorized("no such invitation", hint="ask for one: lamina user invite")
        async with self._hashing:
            known = await asyncio.to_thread(passwords.hash_password, password)
        signed = Person(name=name, tenant=person.tenant, scopes=person.scopes, created_us=person.created_us, password=known)
        caller = Identity(person.tenant, name, frozenset(person.scopes))
        await self.write_audited(caller, "sign-up", name, lambda db: access_store.put(db, signed, name, now_us))

    def save_usage(self, spent: dict[str, float]) -> None:
        """Save usage, best effort: a crash loses at most what was used since the last time."""
        now_us = self.now_us()
        for tenant, unit_us in spent.items():
            self._store.write(partial(access_store.save_usage, tenant=tenant, unit_us=unit_us, now_us=now_us))

    # ------------------------------------------------------------------ changes

    async def write_audited(self, caller: Identity, what: str, subject: str, work: Work[T], note: str = "") -> T:
        """Make a change and write it into the audit log in one transaction; then reload."""
        entry = AuditEntry(at_us=self.now_us(), actor=caller.name, tenant=caller.tenant, what=what, subject=subject, note=note)
        nonce = secrets.token_hex(4)

        def both(db: Session) -> T:
            done = work(db)
            access_store.append_audit(db, entry, nonce)
            return done

        done = await self.write(both)
        await self.load()
        return done

    async def audit(self, caller: Identity, what: str, subject: str = "", *, ok: bool = True, note: str = "") -> None:
        entry = AuditEntry(
            at_us=self.now_us(), actor=caller.name, tenant=caller.tenant, what=what, subject=subject, ok=ok, note=note
        )
        nonce = secrets.token_hex(4)
        await self.write(lambda db: access_store.append_audit(db, entry, nonce))

    def _audit_soon(self, entry: AuditEntry) -> None:
        """Write to the audit log without waiting for the disk: how long an answer takes must not tell which users exist."""
        nonce = secrets.token_hex(4)
        self._store.write(lambda db: access_store.append_audit(db, entry, nonce))

    def write(self, work: Work[T]) -> Awaitable[T]:
        return _future(lambda done: self._store.write(work, done))

    def read(self, work: Work[T]) -> Awaitable[T]:
        return _future(lambda done: self._store.read(work, done))


def _operator_record(text: str, now_us: int) -> Token:
    if not MIN_OPERATOR_CHARS <= len(text) <= 512 or not text.isascii() or not text.isprintable() or " " in text:
        raise BadValue(
            f"the operator's token has {len(text)} characters, or some that cannot be in a header",
            hint=f"at least {MIN_OPERATOR_CHARS} letters and digits: openssl rand -hex 32",
        )
    return Token(
        id=OPERATOR,
        digest=passwords.digest(text),
        name=OPERATOR,
        tenant="",
        scopes=SCOPES,
        created_us=now_us,
        created_by="its file",
        expires_us=now_us + OPERATOR_LIFE_US,
    )


def _future(ask: Callable[[Callable[[T | LaminaError], None]], None]) -> Awaitable[T]:
    future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def done(result: T | LaminaError) -> None:
        if future.done():
            return
        if isinstance(result, LaminaError):
            future.set_exception(result)
        else:
            future.set_result(result)

    ask(done)
    return future
