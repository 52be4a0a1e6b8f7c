"""Fetching values of machines that stand still, die or are too many: others are not held up."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lamina.cluster import data_port
from lamina.cluster.credentials import TicketKey
from lamina.cluster.data_port import DataClient, DataPort, FetchFailed, join_address, ref_for
from lamina.cluster.value_fetcher import PER_MACHINE, Fetched, ValueFetcher
from lamina.values.references import NodeRef, ShmRef
from lamina.values.shm import ShmPool
from tests.serving import run

KEY = TicketKey(b"a token of some length", "cell", 3)
SIZE = 100_000


@contextlib.contextmanager
def machine(folder: Path) -> Iterator[NodeRef]:
    """A machine with one value."""
    folder.mkdir()
    pool, port = ShmPool(str(folder), "gateway", 64 * 2**20), DataPort(str(folder), "127.0.0.1", 0)
    port.set_keys(KEY)
    ref = pool.put(bytes(SIZE))
    assert ref is not None
    try:
        yield ref_for(KEY, join_address("127.0.0.1", port.port), ref)
    finally:
        port.close()
        pool.close()


@contextlib.contextmanager
def frozen_machine() -> Iterator[NodeRef]:
    """A machine that takes connections, as its kernel does, and says nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=256) as server:
        yield NodeRef(join_address("127.0.0.1", server.getsockname()[1]), "gateway", 0, SIZE)


@contextlib.contextmanager
def slots(folder: Path) -> Iterator[ShmPool]:
    folder.mkdir()
    pool = ShmPool(str(folder), "gateway", 64 * 2**20)
    yield pool
    pool.close()


def brought(fetcher: ValueFetcher, ref: NodeRef) -> asyncio.Future[Fetched]:
    done: asyncio.Future[Fetched] = asyncio.get_running_loop().create_future()
    fetcher.bring(ref, done.set_result)
    return done


def test_a_machine_that_stands_still_holds_up_no_other(tmp_path: Path) -> None:
    async def work() -> None:
        fetcher = ValueFetcher(pool=ours)
        stuck = [brought(fetcher, still) for _ in range(5 * PER_MACHINE)]
        found = [await brought(fetcher, good) for _ in range(3)]
        assert all(isinstance(one, ShmRef) and one.size == SIZE for one in found)
        assert not any(one.done() for one in stuck)
        await fetcher.close()
        assert all(isinstance(one, FetchFailed) for one in await asyncio.gather(*stuck))
        assert ours.used_bytes == 3 * 2**17  # what was to be filled is free

    with slots(tmp_path / "ours") as ours, machine(tmp_path / "good") as good, frozen_machine() as still:
        run(work, 20)


def test_what_is_wanted_of_a_machine_fails_when_it_is_known_to_be_lost_and_it_may_come_back(tmp_path: Path) -> None:
    async def work() -> None:
        fetcher = ValueFetcher(pool=ours)
        stuck = [brought(fetcher, still) for _ in range(2 * PER_MACHINE)]
        assert isinstance(await brought(fetcher, good), ShmRef)
        fetcher.drop_machine(still.address)
        fetcher.drop_machine(good.address)
        fetcher.drop_machine("127.0.0.1:1")  # of which nothing is wanted
        assert all(isinstance(one, FetchFailed) for one in await asyncio.gather(*stuck))
        assert isinstance(await brought(fetcher, good), ShmRef)
        await fetcher.close()
        assert isinstance(await brought(fetcher, good), FetchFailed)

    with slots(tmp_path / "ours") as ours, machine(tmp_path / "good") as good, frozen_machine() as still:
        run(work, 20)


def test_a_lost_machine_leaves_no_connection_open_and_no_waiting_task_is_in_the_way(tmp_path: Path) -> None:
    async def work() -> None:
        fetcher = ValueFetcher(pool=ours)
        assert isinstance(await brought(fetcher, good), ShmRef)
        assert good.address in fetcher._client._idle
        fetcher.drop_machine(good.address)
        assert fetcher._client._idle == {}
        reads = [asyncio.create_task(fetcher.read(still)) for _ in range(PER_MACHINE + 1)]
        await asyncio.sleep(0)
        reads[-1].cancel()
        await asyncio.wait(reads[-1:])
        fetcher.drop_machine(still.address)
        assert all(isinstance(one, FetchFailed) for one in await asyncio.gather(*reads[:-1], return_exceptions=True))
        await fetcher.close()

    with slots(tmp_path / "ours") as ours, machine(tmp_path / "good") as good, frozen_machine() as still:
        run(work, 20)


def test_a_value_of_a_size_that_cannot_be_meant_does_not_come(tmp_path: Path) -> None:
    async def work() -> None:
        fetcher = ValueFetcher(pool=ours)
        for size in (2**62, 2**63, 2**100):
            found = await brought(fetcher, NodeRef("127.0.0.1:1", "gateway", 0, size))
            assert isinstance(found, FetchFailed), found
        await fetcher.close()

    with slots(tmp_path / "ours") as ours:
        run(work, 20)


def test_more_machines_than_connections_are_all_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_port, "MAX_CONNECTIONS", 4)
    with machine(tmp_path / "good") as good:
        clients = [DataClient() for _ in range(12)]
        failed: list[str] = []

        def work(client: DataClient) -> None:
            for _ in range(10):
                try:
                    client.fetch(good, bytearray(SIZE))
                except FetchFailed as error:
                    failed.append(error.message)

        threads = [threading.Thread(target=work, args=(client,)) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for client in clients:
            client.close()
        assert failed == []


def test_strangers_that_say_nothing_keep_no_machine_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_port, "MAX_CONNECTIONS", 4)
    monkeypatch.setattr(data_port, "FRESH_S", 0.02)
    with machine(tmp_path / "good") as good, contextlib.ExitStack() as stack:
        host, port = data_port.split_address(good.address)
        for _ in range(20):
            stack.enter_context(socket.create_connection((host, port)))
        client = DataClient()
        client.fetch(good, bytearray(SIZE))
        client.close()


def test_a_pool_that_a_thread_still_looks_into_is_closed_all_the_same(tmp_path: Path) -> None:
    pool = ShmPool(str(tmp_path), "gateway", 64 * 2**20)
    looked_into, other = pool.reserve(SIZE), pool.reserve(SIZE)
    assert looked_into is not None and other is not None
    other[1].release()
    pool.close()
    assert os.listdir(tmp_path) == []
    looked_into[1][:] = bytes(SIZE)  # its memory lives on
