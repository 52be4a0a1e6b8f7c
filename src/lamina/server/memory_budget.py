"""Memory budget: one account of the bytes that clients make a server hold, over all connections, protocols and layers.

Bytes are charged before they are read, where their number is known, and given back by the one object that holds the charge. What
other layers hold (values of runs, slots of shared memory) they count themselves, and the budget asks them: a sum of some integers
where a body is admitted, and nothing at all on the way of a small request, which the flat charge of its connection covers.

An address and a tenant have a share each: a client that fills its own gets 503, and the others are served. What would not fit
even alone gets 413, since to try again would be no use. The last eighth of every limit is for small requests alone: a client
whose address has filled its share with large bodies (another behind the same proxy, say) still has its small ones answered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from ipaddress import ip_address
from typing import Any, ClassVar

from lamina.errors import LaminaError
from lamina.units import show_bytes

NO_LIMIT = 2**62
CONNECTION_BYTES = 32 * 2**10
"""Flat charge of a connection: its head, its buffers, and a small request that is whole after one read."""

SMALL_REQUESTS_SHARE = 8
"""One part in so many of a limit is for small requests alone."""

RETRY_S = 1
"""What a client is told to wait: bodies come and go within seconds."""


class MemoryExhausted(LaminaError):
    """No room in the memory budget now, or in the share of the client."""

    status = 503
    code: ClassVar[str] = "memory-exhausted"


class MemoryShareExceeded(LaminaError):
    """More than the memory budget could ever hold for one client."""

    status = 413
    code: ClassVar[str] = "too-large"


class MemoryCharge:
    """Bytes charged to one holder. Released once; a second release does nothing."""

    __slots__ = ("_address", "_budget", "_layer", "_tenant", "size")

    def __init__(self, budget: MemoryBudget, layer: str, address: str, tenant: str) -> None:
        self._budget = budget
        self._layer = layer
        self._address = address
        self._tenant = tenant
        self.size = 0

    def grow(self, size: int) -> None:
        """Hold `size` bytes in all, if there is room for the rest of them; raises `MemoryExhausted` or `MemoryShareExceeded`."""
        if size > self.size:
            self._budget.check_room(size - self.size, self._address, self._tenant, whole=size)
            self.set(size)

    def set(self, size: int) -> None:
        """Hold `size` bytes, room or not: they are there already."""
        self._budget.add(self._layer, size - self.size, self._address, self._tenant)
        self.size = size

    def hand_over(self) -> None:
        """The bytes are counted by another layer from now on; they stay in the shares of their client until the release."""
        self._budget.add(self._layer, -self.size, "", "")
        self._layer = ""

    def release(self) -> None:
        self.set(0)


class MemoryBudget:
    """Account of bytes with a limit. `sources` are layers that count for themselves, by name."""

    def __init__(
        self,
        limit_bytes: int = NO_LIMIT,
        sources: Mapping[str, Callable[[], int]] | None = None,
        *,
        address_share: float = 0.5,
        tenant_share: float = 0.5,
        reclaim: Callable[[int], int] | None = None,
    ) -> None:
        self.limit_bytes = limit_bytes
        self.address_limit_bytes = int(limit_bytes * address_share)
        self.tenant_limit_bytes = int(limit_bytes * tenant_share)
        self.refusals = {"total": 0, "address": 0, "tenant": 0}  #: by what was used up
        self._sources = dict(sources or {})
        self._reclaim = reclaim  #: gives back bytes of what is kept to be quicker next time; returns how many
        self._charged: dict[str, int] = {}  #: by layer
        self._addresses: dict[str, int] = {}
        self._tenants: dict[str, int] = {}
        self._charged_bytes = 0

    @property
    def used_bytes(self) -> int:
        return self._charged_bytes + sum([held() for held in self._sources.values()])

    @property
    def is_full(self) -> bool:
        return self.used_bytes >= self.limit_bytes

    def layers(self) -> dict[str, int]:
        """Bytes by layer."""
        return {**self._charged, **{name: held() for name, held in self._sources.items()}}

    def address_bytes(self, address: str) -> int:
        return self._addresses.get(address, 0)

    def charge(self, layer: str, size: int, address: str = "", tenant: str = "") -> MemoryCharge:
        """Charge bytes that are to be read; raises `MemoryExhausted` or `MemoryShareExceeded`."""
        charge = MemoryCharge(self, layer, address, tenant)
        charge.grow(size)
        return charge

    def check_room(self, size: int, address: str, tenant: str, *, whole: int = 0) -> None:
        """Raise if there is no room for `size` more bytes of what is `whole` bytes in all."""
        scopes = (
            ("address", self._addresses.get(address, 0), self.address_limit_bytes if address else NO_LIMIT, "of this address"),
            ("tenant", self._tenants.get(tenant, 0), self.tenant_limit_bytes if tenant else NO_LIMIT, "of this tenant"),
            ("total", self.used_bytes, self.limit_bytes, "of the server"),
        )
        for scope, used, most, owner in scopes:
            limit = most if size <= CONNECTION_BYTES else most - most // SMALL_REQUESTS_SHARE
            if scope == "total" and used + size > limit and self._reclaim is not None:
                used -= self._reclaim(used + size - limit)
            if used + size > limit:
                self.refusals[scope] += 1
                if max(size, whole) > limit:
                    raise MemoryShareExceeded(
                        f"{show_bytes(max(size, whole))} at once: the memory {owner} is {show_bytes(limit)}",
                        hint="send less at a time; the operator sets --memory-budget",
                    )
                raise MemoryExhausted(
                    f"the memory {owner} is used up: {show_bytes(used)} of {show_bytes(limit)}",
                    hint="try again after Retry-After, or send less at a time; the operator sets --memory-budget",
                )

    def add(self, layer: str, size: int, address: str, tenant: str) -> None:
        """Book bytes; less than none gives back. Without a layer they count for the shares alone."""
        self._charged_bytes += size if layer else 0
        for table, key in ((self._charged, layer), (self._addresses, address), (self._tenants, tenant)):
            if key:
                table[key] = table.get(key, 0) + size
        if not self._addresses.get(address, 1):
            del self._addresses[address]
        if not self._tenants.get(tenant, 1):
            del self._tenants[tenant]

    def snapshot(self) -> dict[str, Any]:
        """The account for status and metrics."""
        return {
            "limit_bytes": self.limit_bytes,
            "used_bytes": self.used_bytes,
            "layers": self.layers(),
            "refusals": dict(self.refusals),
        }

    def check(self) -> None:
        """Invariants: no sum is negative, and every byte has a layer."""
        assert all(size >= 0 for table in (self._charged, self._addresses, self._tenants) for size in table.values())
        assert self._charged_bytes == sum(self._charged.values())


def address_key(peer: Any) -> str:
    """The client behind a socket's peer name, for its share. An IPv6 customer has 2**64 addresses: they are one."""
    if not isinstance(peer, tuple) or not peer:
        return ""
    host = str(peer[0]).partition("%")[0]
    try:
        address = ip_address(host)
    except ValueError:
        return host
    if address.version == 6:
        mapped = address.ipv4_mapped
        return str(mapped) if mapped is not None else ":".join(address.exploded.split(":")[:4])
    return host
