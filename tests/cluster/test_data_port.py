"""Values between machines: whole, by ticket, and without a byte for a stranger."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from lamina.cluster import data_port
from lamina.cluster.credentials import TicketKey
from lamina.cluster.data_port import REQUEST_BYTES, DataClient, DataPort, FetchFailed, join_address, ref_for
from lamina.values.references import NodeRef
from lamina.values.shm import ShmPool

KEY = TicketKey(b"a token of some length", "cell", 3)


@contextlib.contextmanager
def values(folder: Path) -> Iterator[tuple[ShmPool, DataPort, DataClient]]:
    pool = ShmPool(str(folder), "gateway", 64 * 2**20)
    port = DataPort(str(folder), "127.0.0.1", 0)
    port.set_keys(KEY)
    client = DataClient()
    try:
        yield pool, port, client
    finally:
        client.close()
        port.close()
        pool.close()


def fetched(client: DataClient, ref: NodeRef) -> bytes:
    room = bytearray(ref.size)
    client.fetch(ref, room)
    return bytes(room)


def test_a_value_and_a_part_of_it_arrive_whole(tmp_path: Path):
    with values(tmp_path) as (pool, port, client):
        data = os.urandom(5_000_000)
        ref = pool.put(data)
        assert ref is not None
        address = join_address("127.0.0.1", port.port)
        assert fetched(client, ref_for(KEY, address, ref)) == data
        part = replace(ref, start=1_234_567, size=2_000_001)
        assert fetched(client, ref_for(KEY, address, part)) == data[1_234_567:3_234_568]


def test_many_at_once_over_kept_connections(tmp_path: Path):
    with values(tmp_path) as (pool, port, client):
        blobs = [os.urandom(200_000 + n) for n in range(8)]
        refs = [ref_for(KEY, join_address("127.0.0.1", port.port), ref) for ref in map(pool.put, blobs) if ref is not None]
        wrong: list[int] = []

        def work(number: int) -> None:
            wrong.extend(number for _ in range(20) if fetched(client, refs[number]) != blobs[number])

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


def test_a_ticket_is_for_one_value_of_one_epoch(tmp_path: Path):
    with values(tmp_path) as (pool, port, client):
        first, second = pool.put(bytes(100_000)), pool.put(bytes(100_000))
        assert first is not None and second is not None
        good = ref_for(KEY, join_address("127.0.0.1", port.port), first)
        for bad in (
            replace(good, slot=second.slot),
            replace(good, start=1, size=good.size - 1),
            replace(good, owner="w1"),
            replace(good, ticket=bytes(len(good.ticket))),
        ):
            with pytest.raises(FetchFailed, match="the ticket is not good"):
                fetched(client, bad)
        port.set_keys(TicketKey(b"a token of some length", "cell", 4))
        with pytest.raises(FetchFailed, match="the ticket is not good"):
            fetched(client, good)
        port.set_keys()
        with pytest.raises(FetchFailed, match="the ticket is not good"):
            fetched(client, good)


def test_a_value_that_is_gone_and_a_machine_that_is_gone_are_errors_that_say_so(tmp_path: Path):
    with values(tmp_path) as (pool, port, client):
        ref = pool.put(bytes(100_000))
        assert ref is not None
        asked = ref_for(KEY, join_address("127.0.0.1", port.port), ref)
        assert fetched(client, asked) == bytes(100_000)
        pool.retire(ref.slot)
        pool.free(ref.slot)
        with pytest.raises(FetchFailed, match="the value is gone"):
            fetched(client, asked)
    with pytest.raises(FetchFailed):
        fetched(DataClient(), asked)


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n" * 20, bytes(REQUEST_BYTES), b"LMD1" + os.urandom(REQUEST_BYTES - 4)])
def test_a_stranger_gets_no_byte(tmp_path: Path, data: bytes):
    with values(tmp_path) as (pool, port, _), socket.create_connection(("127.0.0.1", port.port), 10) as stranger:
        pool.put(bytes(100_000))
        stranger.sendall(data)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while piece := stranger.recv(4_096):
                answer += piece
        assert answer in (b"", (-1).to_bytes(8, "little", signed=True))


def test_strangers_that_say_nothing_keep_no_value_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A hundred and twenty-eight silent connections stopped all values for a minute, and with a byte a minute for hours."""
    monkeypatch.setattr(data_port, "MAX_CONNECTIONS", 4)
    monkeypatch.setattr(data_port, "FRESH_S", 0.05)
    with values(tmp_path) as (pool, port, client), contextlib.ExitStack() as strangers:
        address = join_address("127.0.0.1", port.port)
        before = pool.put(b"before" * 20_000)
        assert before is not None and fetched(client, ref_for(KEY, address, before)) == b"before" * 20_000
        for _ in range(12):
            strangers.enter_context(socket.create_connection(("127.0.0.1", port.port), 10))
        for number in range(3):  # the client's connection stays open, and newcomers find room
            found = pool.put(b"%d" % number * 20_000)
            assert found is not None
            newcomer = DataClient()
            for one in (client, newcomer):
                assert fetched(one, ref_for(KEY, address, found)) == b"%d" % number * 20_000
            newcomer.close()
        assert len(port._open) <= 4


@pytest.mark.live
@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
def test_strangers_that_do_not_begin_their_handshake_are_ended_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each kept its thread for ten seconds after it had made room: as many as came."""
    monkeypatch.setattr(data_port, "MAX_CONNECTIONS", 4)
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    made = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-keyout",
        key,
        "-out",
        cert,
        "-subj",
        "/CN=x",
        "-days",
        "2",
    ]
    subprocess.run(made, check=True, capture_output=True)
    ours, theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context(cafile=cert)
    ours.load_cert_chain(cert, key)
    theirs.check_hostname = False
    folder = tmp_path / "values"
    folder.mkdir()
    pool, port, client = ShmPool(str(folder), "gateway", 2**20), DataPort(str(folder), "127.0.0.1", 0, ours), DataClient(theirs)
    port.set_keys(KEY)
    with contextlib.ExitStack() as stack:
        for end in (pool.close, port.close, client.close):
            stack.callback(end)
        waiting = [stack.enter_context(socket.create_connection(("127.0.0.1", port.port), 10)) for _ in range(12)]
        ended, until_s = 0, time.monotonic() + 5.0  # half of what a handshake may take
        while ended < 8 and time.monotonic() < until_s:
            found, _, _ = select.select(waiting, [], [], until_s - time.monotonic())
            waiting = [one for one in waiting if one not in found]
            ended += len(found)
        assert ended == 8
        value = pool.put(b"value")
        assert value is not None
        assert fetched(client, ref_for(KEY, join_address("127.0.0.1", port.port), value)) == b"value"


def test_connections_that_were_idle_for_too_long_cost_no_value(tmp_path: Path):
    """One of them was tried again over the next, which was closed as well."""
    with values(tmp_path) as (pool, port, client):
        value = pool.put(b"value")
        assert value is not None
        ref = ref_for(KEY, join_address("127.0.0.1", port.port), value)
        idle: list[socket.socket] = []
        for _ in range(3):  # as of three fetches at a time
            fetched(client, ref)
            idle += client._idle.pop(ref.address)
        client._idle[ref.address] = idle
        for connection in list(port._open):
            connection.shutdown(socket.SHUT_RDWR)
        assert fetched(client, ref) == b"value"
        assert len(client._idle[ref.address]) == 1


def test_a_stranger_has_a_time_limit_however_often_it_says_a_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(data_port, "STRANGER_S", 0.3)
    with values(tmp_path) as (_, port, _client), socket.create_connection(("127.0.0.1", port.port), 10) as stranger:
        stranger.settimeout(0.05)
        for _ in range(REQUEST_BYTES - 1):  # four seconds
            try:
                stranger.sendall(b"x")
                if not stranger.recv(1):
                    return
            except TimeoutError:
                continue
            except ConnectionError:
                return
        raise AssertionError("it is still listened to")


def test_without_a_join_token_only_processes_of_this_user_are_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Any process could make tickets then: the cell and the epoch are told to all that ask."""
    pool = ShmPool(str(tmp_path), "gateway", 2**20)
    port = DataPort(str(tmp_path), "127.0.0.1", 0, only_own=True)
    port.set_keys(KEY)
    client = DataClient()
    try:
        ref = pool.put(b"mine" * 20_000)
        assert ref is not None
        asked = ref_for(KEY, join_address("127.0.0.1", port.port), ref)
        assert fetched(client, asked) == b"mine" * 20_000
        client.close()
        monkeypatch.setattr(data_port, "peer_user", lambda local, peer: 200_000)
        with pytest.raises(FetchFailed):
            fetched(DataClient(), asked)
    finally:
        port.close()
        pool.close()
