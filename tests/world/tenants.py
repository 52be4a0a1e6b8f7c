"""Tenants of a world: tokens that are made, expire and are revoked, keys that two tenants use alike, limits, and curiosity.

What must hold, by what the clients were told: no tenant sees, changes or is given another's run, key or state; a token does
nothing once its revocation was acknowledged, or its time is over, on whichever server; a token that is good is taken; a tenant
gets no more calls than its rate allows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.world.server import TENANTS as NAMES
from tests.world.server import Reply

if TYPE_CHECKING:
    from tests.world.play import World

KEYS = 4
"""Idempotency keys, which all tenants use."""

ANSWERED = range(200, 300)
AGAIN = (0, 401, 429, 503)


@dataclass
class Token:
    tenant: str
    id: str
    text: str
    expires_us: int  #: by the wall clock
    is_revoking: bool = False
    is_revoked: bool = False  #: and that was acknowledged

    @property
    def has_expired(self) -> bool:
        return time.time_ns() // 1_000 >= self.expires_us


@dataclass
class TenantRun:
    """One run that a tenant wants, under a key that the other one uses too."""

    tenant: str
    key: str
    n: int
    ids: set[str] = field(default_factory=set)
    refused: str = ""


class Tenants:
    """Clients of two tenants, and the operator who lets them in."""

    def __init__(self, world: World) -> None:
        self._world, self._rng = world, world.rng
        self.tokens: list[Token] = []
        self.runs: dict[tuple[str, str], TenantRun] = {}
        self.errands = 0  #: of the operator, that have not been done yet
        self._limits = {name: world.rng.choice((0, 2)) for name in NAMES}
        self._limited: set[str] = set()  #: whose limits are set

    # ---------------------------------------------------------------- the operator

    def administer(self, what: str, params: dict[str, Any], done: Callable[[Reply], None]) -> None:
        """Ask until it has been done; what is not there any more has been removed."""

        def answered(reply: Reply) -> None:
            if reply.status in (200, 404):
                self.errands -= 1
                done(reply)
            elif reply.status in (0, 500, 503):
                self._later(ask)
            else:
                self.errands -= 1
                self._wrong(f"{what} {params}: {reply.status} {reply.body!r}")

        def ask() -> None:
            self._world.send("POST", f"/v1/admin/{what}", params, {}, answered, management=True)

        self.errands += 1
        ask()

    def set_up(self) -> None:
        for name in NAMES:
            self._let_in(name)

    def _let_in(self, name: str) -> None:
        def done(reply: Reply) -> None:
            self._limited.add(name)
            self.make_token(name)

        rate = self._limits[name]
        self.administer("tenant/set", {"name": name, "rate_per_s": rate, "burst": rate}, done)

    def make_token(self, name: str) -> None:
        def made(reply: Reply) -> None:
            if reply.status != 200:
                self._wrong(f"no token for {name}: {reply.body!r}")
                return
            shown = reply.json
            self.tokens.append(Token(name, shown["id"], shown["token"], shown["expires_us"]))

        life = self._rng.choice(("1s", "30d", "30d"))
        self.administer("token/create", {"tenant": name, "scopes": ["invoke", "read"], "expires": life}, made)

    def revoke(self) -> None:
        good = [token for token in self.tokens if not token.is_revoking]
        if not good:
            return
        token = self._rng.choice(good)
        token.is_revoking = True

        def gone(reply: Reply) -> None:
            token.is_revoked = True

        self.administer("token/revoke", {"id": token.id}, gone)
        self.make_token(token.tenant)

    # ------------------------------------------------------------------ the tenants

    def send(
        self, token: Token, method: str, path: str, body: Any, headers: dict[str, str], done: Callable[[Reply], None]
    ) -> None:
        """Ask with a token: what is answered must fit what is known of it."""
        world = self._world
        was_revoked, had_expired, was_good = token.is_revoked, token.has_expired, not token.is_revoking
        jumps = world.jumped

        def answered(reply: Reply) -> None:
            steady = world.jumped == jumps  # else the wall clock was another one in between
            if reply.status in ANSWERED and was_revoked:
                self._wrong(f"{method} {path}: {reply.status} with token {token.id}, whose revocation had been acknowledged")
            if reply.status in ANSWERED and had_expired and steady:
                self._wrong(f"{method} {path}: {reply.status} with token {token.id}, which had expired")
            if reply.status == 401 and was_good and not (token.is_revoking or token.has_expired) and steady:
                self._wrong(f"{method} {path}: token {token.id} is good, and was refused: {reply.body!r}")
            done(reply)

        world.send(method, path, body, {**headers, "authorization": f"Bearer {token.text}"}, answered)

    def _any_token(self, tenant: str, *, good: bool = False) -> Token | None:
        tokens = [one for one in self.tokens if one.tenant == tenant and not (good and (one.is_revoking or one.has_expired))]
        return self._rng.choice(tokens) if tokens else None

    def call(self) -> None:
        """A call, with any token it ever had."""
        name, n = self._rng.choice(NAMES), self._rng.randint(0, 9)
        token = self._any_token(name)
        if token is None:
            return

        def answered(reply: Reply) -> None:
            if reply.status == 200 and reply.json != n:
                self._wrong(f"echo({n}) of {name} answered {reply.body!r}")

        self.send(token, "POST", "/v1/functions/echo", n, {}, answered)

    def hurry(self) -> None:
        """More calls at once than a rate allows."""
        name = self._rng.choice(NAMES)
        token, rate = self._any_token(name, good=True), self._limits[name]
        if token is None or not rate or name not in self._limited:
            return
        machine, servers = self._world.machine, self._world.servers
        began_us, starts = machine.now_us, sum(server.starts for server in servers)
        statuses: list[int] = []

        def answered(reply: Reply) -> None:
            statuses.append(reply.status)
            allowed = rate * (2 + (machine.now_us - began_us) / 1e6)  # at once, and as time went on; a call more at each end
            if statuses.count(200) > allowed and sum(server.starts for server in servers) == starts:
                self._wrong(f"{statuses.count(200)} calls of {name} were answered, {allowed:.1f} are allowed")

        for _ in range(8):
            self.send(token, "POST", "/v1/functions/echo", 1, {}, answered)

    def start_run(self) -> None:
        name, key = self._rng.choice(NAMES), f"shared-{self._rng.randrange(KEYS)}"
        run = self.runs.setdefault((name, key), TenantRun(name, key, self._rng.randint(1, 9)))
        self.ask(run)

    def ask(self, run: TenantRun) -> None:
        token = self._any_token(run.tenant, good=self._rng.random() < 0.8)
        if token is None:
            if not self.errands:  # all of them have expired
                self.make_token(run.tenant)
            self._later(lambda: self.ask(run))
            return

        def answered(reply: Reply) -> None:
            if reply.status in ANSWERED:
                run.ids.add(reply.json["id"])
            elif reply.status in AGAIN:
                self._later(lambda: self.ask(run))
            else:
                run.refused = f"{reply.status} {reply.body!r}"

        headers = {"prefer": "respond-async", "idempotency-key": run.key}
        self.send(token, "POST", f"/v1/workflows/{run.tenant}", run.n, headers, answered)

    def pry(self) -> None:
        """Ask for what is another's: nothing of it is there."""
        name = self._rng.choice(NAMES)
        other = NAMES[1 - NAMES.index(name)]
        token = self._any_token(name)
        if token is None:
            return
        ids = [id for run in self.runs.values() if run.tenant == other for id in run.ids]
        ids += [id for asked in self._world.history.runs for id in asked.ids]  # the operator's
        ways: list[tuple[str, str, Any]] = [
            ("GET", f"/v1/state/kept?app={other}-app", None),
            ("PUT", f"/v1/state/kept?app={other}-app", 0),
            ("GET", "/v1/state/sum-a?app=world", None),
            ("POST", f"/v1/workflows/{other}", 1),
        ]
        if ids:
            id = self._rng.choice(ids)
            ways += [
                ("GET", f"/v1/runs/{id}", None),
                ("GET", f"/v1/runs/{id}/result", None),
                ("POST", f"/v1/runs/{id}/cancel", None),
            ]
        method, path, body = self._rng.choice(ways)

        def answered(reply: Reply) -> None:
            if reply.status not in (404, *AGAIN):
                self._wrong(f"{method} {path} by {name}: {reply.status} {reply.body!r}")

        self.send(token, method, path, body, {}, answered)

    def list_runs(self) -> None:
        name = self._rng.choice(NAMES)
        token = self._any_token(name)
        if token is None:
            return

        def answered(reply: Reply) -> None:
            if reply.status == 200 and any(run.get("tenant") != name for run in reply.json["runs"]):
                self._wrong(f"{name} is shown runs of others: {reply.body!r}")

        self.send(token, "GET", "/v1/runs", None, {}, answered)

    # -------------------------------------------------------------------- the checks

    @property
    def is_settled(self) -> bool:
        return not self.errands and all(run.ids or run.refused for run in self.runs.values())

    def check(self, is_honest_failure: Callable[[Reply], bool], wait_for: Callable[[str], Reply]) -> None:
        world = self._world
        owners: dict[str, str] = {}
        least, most = dict.fromkeys(NAMES, 0), dict.fromkeys(NAMES, 0)
        for run in self.runs.values():
            if run.refused or len(run.ids) != 1:
                self._wrong(f"{run.tenant} {run.key}: {run.refused or f'is {len(run.ids)} runs'}")
                continue
            (id,) = run.ids
            if owners.setdefault(id, run.tenant) != run.tenant:
                self._wrong(f"{run.key}: one run for two tenants")
            shown = wait_for(id)
            if shown.status != 200 or shown.json.get("tenant") != run.tenant:
                self._wrong(f"{run.tenant} {run.key}: {shown.status} {shown.body!r}")
                continue
            has_succeeded = shown.json["state"] == "succeeded"
            if not has_succeeded and not is_honest_failure(shown):
                self._wrong(f"{run.tenant} {run.key} is {shown.json['state']}: {shown.body[:400]!r}")
            most[run.tenant] += run.n
            least[run.tenant] += run.n if has_succeeded else 0
        for name in NAMES:
            shown = world.read(f"/v1/state/kept?app={name}-app")
            found = shown.json["value"] if shown.status == 200 else 0
            if not least[name] <= found <= most[name]:
                self._wrong(f"kept of {name} is {found}, and what ended adds up to {least[name]}, at most {most[name]}")
        for token in self.tokens:
            if token.is_revoked:
                reply = world.read("/v1/runs", {"authorization": f"Bearer {token.text}"})
                if reply.status != 401:
                    self._wrong(f"token {token.id} was revoked, and is answered {reply.status} at the end")

    def _later(self, ask: Callable[[], None]) -> None:
        self._world.machine.call_at(self._world.machine.now_us + self._rng.randint(10_000, 500_000), ask)

    def _wrong(self, what: str) -> None:
        self._world.history.wrong.append(what)
