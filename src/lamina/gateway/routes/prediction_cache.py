"""Prediction cache: results of functions that declare `cache=`, by tenant, function version and hash of the inputs.

It stands before admission: a hit never reaches the controller, so it costs no device time, waits in no queue and is neither
refused nor simulated. Equal calls in flight share one execution (single flight): the first one is submitted, the others follow
it if they allow as much time and are no more urgent. When it fails, is refused or expires, its followers are submitted with
what time they have left, each on its own: one call's deadline or cost limit says nothing about another's.

- **Tenants**: the tenant is part of the key, so no tenant sees, times or joins what another has asked. Each holds at most half
  of the cache, and when the whole is full the tenant that holds most gives way.
- **Memory**: entries are a layer of the server's memory budget and the first to go when requests need room.
- **Freshness**: entries end after the function's time, and at a deployment. While instances of an older version still run
  nothing is kept. A function that has read or changed state is not cached any more: its result depends on more than inputs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Mapping
from functools import partial
from hashlib import blake2b
from typing import Any

import msgspec

from lamina import encoding
from lamina.core.actions import Reply
from lamina.drivers.driver import Ending, OnEnd
from lamina.drivers.realtime import RealtimeDriver
from lamina.gateway.observability.gauges import CacheCounters
from lamina.gateway.routes.targets import CallTarget, TargetRegistry
from lamina.types import Call
from lamina.values.references import stored_size

MAX_INPUT_BYTES = 2 * 2**20
"""Larger inputs are not cached: to hash them holds up other requests, and they seldom come twice."""

ENTRY_BYTES = 256
"""Charged for an entry besides its value: keys, tables, the object."""

TENANT_SHARE = 2
"""A tenant holds at most one part in so many of the cache."""

ENTRY_SHARE = 16
"""An entry takes at most one part in so many of the cache."""

CacheKey = tuple[str, str, str, bytes]
"""Tenant, target, its version, digest of the inputs."""

NO_LOOKUP = b"no-cache"
NO_CACHE_AT_ALL = b"no-store"


class CachedResult(msgspec.Struct, frozen=True):
    """A result as it was encoded, and until when it may be used."""

    blob: bytes
    until_us: int

    @property
    def size(self) -> int:
        return len(self.blob) + ENTRY_BYTES


class _Flight:
    """A call under way whose result others wait for."""

    __slots__ = ("call", "followers", "inputs", "is_left", "key")

    def __init__(self, key: CacheKey | None, call: Call, inputs: dict[str, bytes]) -> None:
        self.key = key  #: None: its result is not to be kept
        self.call = call
        self.inputs = inputs
        self.followers: dict[str, tuple[Call, OnEnd]] = {}
        self.is_left = False  #: by its own client


class PredictionStore:
    """Entries of all tenants, least recently used first in each; owner of their bytes."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self._tenants: dict[str, OrderedDict[CacheKey, CachedResult]] = {}
        self._bytes: dict[str, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._tenants.values()))

    def get(self, key: CacheKey, now_us: int) -> bytes | None:
        entries = self._tenants.get(key[0])
        entry = entries.get(key) if entries is not None else None
        if entry is None or entries is None:
            return None
        if now_us >= entry.until_us:
            self._remove(key)
            return None
        entries.move_to_end(key)
        return entry.blob

    def put(self, key: CacheKey, entry: CachedResult) -> None:
        """Keep a result, if it is not too large for the cache; others of its tenant make room first, then of the largest one."""
        tenant, size = key[0], entry.size
        if size > self.limit_bytes // ENTRY_SHARE:
            return
        if key in self._tenants.get(tenant, ()):
            self._remove(key)
        while self._bytes.get(tenant, 0) + size > self.limit_bytes // TENANT_SHARE:
            self._remove(next(iter(self._tenants[tenant])))
        self.reclaim(self.held_bytes + size - self.limit_bytes)
        self._tenants.setdefault(tenant, OrderedDict())[key] = entry
        self._bytes[tenant] = self._bytes.get(tenant, 0) + size
        self.held_bytes += size

    def reclaim(self, size: int) -> int:
        """Give back at least `size` bytes, if there are as many; returns how many were."""
        before = self.held_bytes
        while self._bytes and before - self.held_bytes < size:
            largest = max(self._bytes, key=self._bytes.__getitem__)
            self._remove(next(iter(self._tenants[largest])))
        return before - self.held_bytes

    def keep_only(self, versions: Container[tuple[str, str]]) -> None:
        """Drop entries of targets and versions that are not served any more."""
        for entries in list(self._tenants.values()):
            for key in [one for one in entries if (one[1], one[2]) not in versions]:
                self._remove(key)

    def _remove(self, key: CacheKey) -> None:
        tenant = key[0]
        size = self._tenants[tenant].pop(key).size
        self.held_bytes -= size
        self._bytes[tenant] -= size
        if not self._tenants[tenant]:
            del self._tenants[tenant], self._bytes[tenant]

    def check(self) -> None:
        """Invariants: bytes are those of the entries, and within their limits."""
        held = {tenant: sum(entry.size for entry in entries.values()) for tenant, entries in self._tenants.items()}
        assert held == self._bytes and sum(held.values()) == self.held_bytes
        assert self.held_bytes <= self.limit_bytes and all(self._tenants.values())
        assert all(size <= self.limit_bytes // TENANT_SHARE for size in held.values())


class PredictionCache:
    """Way of calls to the driver, past what is known or under way already. `stateful`: functions that have touched state."""

    def __init__(
        self,
        driver: RealtimeDriver,
        store: PredictionStore,
        targets: TargetRegistry,
        counters: CacheCounters,
        stateful: Container[str] = (),
        on_answered: Callable[[int, Reply], None] | None = None,
    ) -> None:
        self.store = store
        self._driver = driver
        self._targets = targets
        self._counters = counters
        self._stateful = stateful
        self._on_answered = on_answered
        self._flights: dict[CacheKey, _Flight] = {}  #: that further calls may join
        self._leading: dict[str, _Flight] = {}  #: by call
        self._following: dict[str, _Flight] = {}  #: by call
        targets.subscribe(self._on_deployed)

    def submit(
        self, target: CallTarget, call: Call, inputs: dict[str, Any], on_end: OnEnd, headers: Mapping[bytes, bytes] | None = None
    ) -> None:
        """As `RealtimeDriver.submit`: `on_end` is called once, with the result in `driver.data`."""
        key = None
        is_fresh, is_kept = _cache_control(headers.get(b"cache-control", b"") if headers is not None else b"")
        is_small = sum(map(stored_size, inputs.values())) <= MAX_INPUT_BYTES
        if is_kept and is_small and self._is_settled(target.name):
            inputs = self._driver.data.copied(inputs)
            key = (call.tenant, target.name, target.version, _digest(inputs))
        if key is None:
            self._counters.on_lookup(target.name, "bypass")
            self._driver.submit(call, inputs, on_end)
            return
        if not is_fresh:
            blob = self.store.get(key, self._driver.now_us())
            if blob is not None:
                self._counters.on_lookup(target.name, "hit")
                self._answer(call, blob, on_end)
                return
            flight = self._flights.get(key)
            if flight is not None and _may_follow(call, flight.call):
                self._counters.on_lookup(target.name, "joined")
                flight.followers[call.id] = (call, on_end)
                self._following[call.id] = flight
                return
        self._counters.on_lookup(target.name, "miss")
        flight = _Flight(key, call, inputs)
        self._flights[key] = self._leading[call.id] = flight
        try:
            self._driver.submit(call, inputs, partial(self._on_flight_ended, flight, target.cache_us, on_end))
        except BaseException:
            self._land(flight)
            raise

    def cancel(self, call_id: str) -> None:
        """A client has left. A call that others follow runs on for them."""
        flight = self._following.pop(call_id, None)
        if flight is not None:
            flight.followers.pop(call_id, None)
            if not flight.followers and flight.is_left:
                self._driver.cancel(flight.call.id)
            return
        flight = self._leading.get(call_id)
        if flight is not None and flight.followers:
            flight.is_left = True
        else:
            self._driver.cancel(call_id)

    def _on_flight_ended(self, flight: _Flight, cache_us: int, on_end: OnEnd, ending: Ending) -> None:
        self._land(flight)
        followers, flight.followers = flight.followers, {}
        for call_id in followers:
            self._following.pop(call_id, None)
        blob = None
        if isinstance(ending, Reply):
            ending = msgspec.structs.replace(ending, cache="miss")
            target = flight.call.target
            if followers or flight.key is not None:
                blob = bytes(self._driver.data.result(ending.call_id))
                if target in self._stateful or not _is_success(blob):
                    blob = None
                elif flight.key is not None:
                    self.store.put(flight.key, CachedResult(blob, self._driver.now_us() + cache_us))
        try:
            on_end(ending)
        finally:
            for call, follow in followers.values():
                if blob is not None:
                    self._answer(call, blob, follow)
                else:
                    self._driver.submit(call, dict(flight.inputs), follow)

    def _land(self, flight: _Flight) -> None:
        self._leading.pop(flight.call.id, None)
        if flight.key is not None and self._flights.get(flight.key) is flight:
            del self._flights[flight.key]

    def _answer(self, call: Call, blob: bytes, on_end: OnEnd) -> None:
        now_us = self._driver.now_us()
        reply = Reply(call.id, max(0, now_us - call.arrived_us), now_us > call.deadline_us, batch=0, cache="hit")
        if self._on_answered is not None:
            self._on_answered(now_us, reply)
        self._driver.answer(reply, blob, on_end)

    def _is_settled(self, function: str) -> bool:
        """Every instance has the version that is served, and results depend on inputs alone as far as is known."""
        state = self._driver.controller.state.functions.get(function)
        if state is None or function in self._stateful:
            return False
        version = state.spec.version
        return all(instance.version == version for instance in state.instances.values())

    def _on_deployed(self) -> None:
        """Calls under way may be of the version before: neither kept nor joined from now on."""
        self.store.keep_only({(target.name, target.version) for target in self._targets.all})
        for flight in self._flights.values():
            flight.key = None
        self._flights.clear()


def _cache_control(header: bytes) -> tuple[bool, bool]:
    """What a request says (RFC 9111): whether it wants no earlier result, and whether its own may be kept."""
    if not header:
        return False, True
    words = {word.strip().lower() for word in header.split(b",")}
    return NO_LOOKUP in words, NO_CACHE_AT_ALL not in words


def _may_follow(call: Call, leader: Call) -> bool:
    """The leader is decided about by its own deadline and priority: a call that wants more has to go by itself."""
    is_patient = call.deadline_us >= leader.deadline_us and call.expires_us >= leader.expires_us
    return is_patient and call.priority <= leader.priority


def _digest(inputs: Mapping[str, bytes]) -> bytes:
    digest = blake2b(digest_size=32)
    for name in sorted(inputs):
        blob = inputs[name]
        digest.update(b"%d:%d:" % (len(name), len(blob)))
        digest.update(name.encode())
        digest.update(blob)
    return digest.digest()


def _is_success(blob: bytes) -> bool:
    """Whether a result may be given again: a response of the function's own is one only with a status below 300."""
    return encoding.response_status(blob) < 300
