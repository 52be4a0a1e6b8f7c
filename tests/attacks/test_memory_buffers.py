"""Buffers by key: bytes on their way to the disk are counted, the disk is not filled, and no key costs others their time."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina import encoding
from lamina.errors import NotFound
from lamina.gateway.routes import kernels
from lamina.kernels.buffer_store import BuffersFull, BufferStore, read_data
from lamina.server.exchange import HttpRequest
from lamina.server.memory_budget import MemoryBudget, MemoryExhausted
from tests.attacks.gateways import emulated
from tests.serving import Browser, run


def kept(store: BufferStore, tenant: str, key: str, size: int = 4) -> None:
    store.commit(store.write(tenant, key, "uint8", (size,), bytes(size)))


class Stuck:
    """A store whose disk answers when it is told to."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def check_room(self, tenant: str, key: str, size: int) -> None:
        pass

    def write(self, *_: Any) -> Any:
        self.goes_on.wait(30)
        raise NotFound("the disk is gone")


def a_put(size: int) -> HttpRequest:
    return HttpRequest("PUT", b"/v1/buffers/k", b"dtype=uint8&shape=%d" % size, {}, bytes(size), True)


def test_c1_bodies_of_clients_that_have_left_are_counted_until_they_are_written():
    """The exchange of a client that has left is gone with its charge; its body waits for a thread all the same."""
    grant: Any = SimpleNamespace(tenant="evil")

    async def work() -> None:
        store, budget = Stuck(), MemoryBudget(2**30)
        routes = kernels.BufferRoutes(store, budget)  # type: ignore[arg-type]
        put = routes.routes["PUT /v1/buffers/{buffer*}"]
        exchange: Any = SimpleNamespace(respond=lambda *_: None)
        for _ in range(kernels.MAX_WAITING):
            put(a_put(1_000), exchange, grant, "k")
        assert budget.layers()["buffers"] == 1_000 * kernels.MAX_WAITING
        with pytest.raises(kernels.BuffersBusy):
            put(a_put(1_000), exchange, grant, "k")
        store.goes_on.set()
        async with asyncio.timeout(30):
            while budget.layers()["buffers"]:
                await asyncio.sleep(0)

    run(work)


def test_what_is_read_finds_room_before_it_is_read(tmp_path: Path) -> None:
    """64 readers of 31 MiB each took 2 GiB, whatever the budget was."""
    store = BufferStore(tmp_path)
    kept(store, "evil", "k", 100_000)
    budget = MemoryBudget(1_000_000)
    grant: Any = SimpleNamespace(tenant="evil")

    async def work() -> None:
        routes = kernels.BufferRoutes(store, budget)
        exchange: Any = SimpleNamespace(respond=lambda *_: None, address="192.0.2.1")
        get, request = routes.routes["GET /v1/buffers/{buffer*}"], HttpRequest("GET", b"", b"", {}, b"", True)
        for _ in range(4):  # half of the budget is the most for one address, less what is for small requests
            get(request, exchange, grant, "k")
        with pytest.raises(MemoryExhausted):
            get(request, exchange, grant, "k")
        assert budget.layers()["buffers"] == 400_000
        async with asyncio.timeout(30):
            while budget.layers()["buffers"]:
                await asyncio.sleep(0)

    run(work)


def test_an_encoded_body_that_is_no_array_is_not_decoded(monkeypatch: pytest.MonkeyPatch):
    def never(*_: Any) -> Any:
        raise AssertionError("decoded")

    async def work() -> None:
        async with emulated() as gateway, Browser(gateway.port) as browser:
            monkeypatch.setattr(encoding, "decode", never)
            kind = "application/vnd.lamina.value"
            for body in (encoding.encode([[]] * 1_000), encoding.encode({"a": 1}), b"\xc7", b"\xc9\xff\xff\xff\xff\x01", b""):
                answer = await browser.ask("PUT", "/v1/buffers/k", body, kind)
                assert answer.status == 400, answer.body
            numpy = pytest.importorskip("numpy")
            array = numpy.arange(6, dtype="int32").reshape(2, 3)
            assert (await browser.ask("PUT", "/v1/buffers/k", encoding.encode(array), kind)).status == 200
            back = await browser.ask("GET", "/v1/buffers/k", accept=kind)
            monkeypatch.undo()
            assert (encoding.decode(back.body) == array).all()

    run(work)


def test_the_last_of_the_disk_is_not_for_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Durable runs are on the same disk, as a rule: a client with a token for calls must not be able to stop them."""
    store = BufferStore(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=100 * 2**30, free=2**30 + 3))
    with pytest.raises(BuffersFull):
        kept(store, "evil", "k")
    monkeypatch.undo()
    kept(store, "evil", "k")
    assert [path.name[:5] for path in tmp_path.glob("*/.new-*")] == []


def test_a_buffer_that_is_deleted_while_it_is_read_is_not_found(tmp_path: Path):
    store = BufferStore(tmp_path)
    kept(store, "acme", "k")
    stored = store.find("acme", "k")
    store.remove("acme", "k")
    with pytest.raises(NotFound):
        read_data(stored)


steps = st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 9)), max_size=20)


@given(steps, st.sampled_from(["", "b", "zz"]), st.sampled_from(["", "a", "d"]))
def test_what_is_listed_and_counted_is_what_there_is(made: list[tuple[str, int]], prefix: str, after: str):
    store, there = BufferStore(), dict[str, int]()
    try:
        for key, size in made:
            if size:
                kept(store, "t", key, size)
                there[key] = size
            elif key in there:
                store.remove("t", key)
                del there[key]
        wanted = [key for key in sorted(there) if key.startswith(prefix) and key > after]
        assert [one.key for one in store.list("t", prefix, after)] == wanted
        assert [one.key for one in store.list("t", prefix, after, 1)] == wanted[:1]
        assert store.used_bytes("t") == sum(there.values()) and store.list("other") == []
    finally:
        store.close()


names = st.sampled_from(["a", "b", "a-b", "a.b", "ab"])


@given(st.lists(st.tuples(names, st.sampled_from(["x", "y", "x/y"])), max_size=12))
def test_folders_are_found_without_looking_at_all_keys(made: list[tuple[str, str]]):
    store = BufferStore()
    try:
        for folder, name in set(made):
            kept(store, "t", f"root/{folder}/{name}")
        kept(store, "t", "rooted/c/x")
        wanted = Counter(folder for folder, _ in set(made))
        found = store.folders("t", "root")
        assert found == dict(wanted)
        pages: dict[str, int] = {}
        while page := store.folders("t", "root", next(reversed(pages), ""), 2):
            pages |= page
        assert list(pages.items()) == list(found.items())
    finally:
        store.close()
