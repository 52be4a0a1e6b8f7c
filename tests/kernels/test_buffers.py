"""The data layer: buffers by key, kept apart between tenants, read and left by kernel graphs, and found again after a restart."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import numpy as np
import pytest

import lamina
from lamina.bootstrap import open_local
from lamina.errors import BadValue, NotFound
from lamina.gateway.bootstrap import open_gateway
from lamina.gateway.routes.kernels import _shape
from lamina.kernels.buffer_store import BuffersFull, BufferStore, MappedBuffers, read_data
from lamina.worker.main import BatchBuffers
from lamina.worker.protocol import JobFrame, RunBatch
from tests.kernels.test_serving import SOURCE
from tests.serving import Browser


def put(store: BufferStore, tenant: str, key: str, array: np.ndarray) -> None:
    store.commit(store.write(tenant, key, array.dtype.name, array.shape, array.tobytes()))


def test_a_tenant_finds_its_own_buffers_and_no_others(tmp_path: Path):
    store = BufferStore(tmp_path)
    put(store, "acme", "k", np.arange(4.0))
    put(store, "evil", "k", np.zeros(1, np.int8))
    assert read_data(store.find("acme", "k")) == np.arange(4.0).tobytes()
    assert [one.nbytes for one in store.list("evil")] == [1]
    for tenant in ("", "acm", "acme2"):
        with pytest.raises(NotFound):
            store.find(tenant, "k")
    for key in ("../acme/k", "/k", "a//b", "", "a" * 300, ".hidden"):
        with pytest.raises(BadValue, match="no key"):
            store.find("acme", key)
    assert os.path.dirname(store.find("acme", "k").path) != os.path.dirname(store.find("evil", "k").path)


def test_what_was_kept_is_there_after_a_restart_and_what_was_half_written_is_not(tmp_path: Path):
    store = BufferStore(tmp_path)
    put(store, "", "a/b", np.arange(6, dtype=np.int32).reshape(2, 3))
    store.write("", "never", "int8", (1,), b"x")  # its server dies before it is committed
    (Path(store.find("", "a/b").path).parent / "torn.buffer").write_bytes(b"lamina buffer 1\n torn")
    again = BufferStore(tmp_path)
    assert [(one.key, one.shape) for one in again.list("")] == [("a/b", (2, 3))]
    assert not list(tmp_path.glob("*/.new-*"))


def test_a_new_value_leaves_what_was_mapped_as_it_was(tmp_path: Path):
    store, mapped = BufferStore(tmp_path), MappedBuffers(1 << 20)
    put(store, "", "k", np.zeros(1_000))
    first = store.find("", "k")
    before = mapped.open(first.path, first.digest)
    put(store, "", "k", np.ones(1_000))
    second = store.find("", "k")
    assert before.sum() == 0 and mapped.open(second.path, second.digest).sum() == 1_000
    with pytest.raises(ValueError, match="read-only"):
        before[0] = 1


def test_what_stays_mapped_follows_the_rule_of_the_cache(tmp_path: Path):
    store, mapped = BufferStore(tmp_path), MappedBuffers(3_000)
    for name in "abcd":
        put(store, "", name, np.full(1_000, ord(name), np.uint8))
    for name in "aaabcd":
        stored = store.find("", name)
        assert mapped.open(stored.path, stored.digest)[0] == ord(name)
    mapped.cache.check()
    assert (
        len(mapped.cache) == 3 and store.find("", "a").digest in mapped.cache and store.find("", "b").digest not in mapped.cache
    )


def test_many_buffers_hold_few_files_open(tmp_path: Path):
    store, mapped = BufferStore(tmp_path), MappedBuffers(1 << 30)
    before = len(os.listdir("/proc/self/fd"))
    for place in range(300):
        put(store, "", f"small/{place}", np.full(10, place))
        stored = store.find("", f"small/{place}")
        mapped.open(stored.path, stored.digest)
    put(store, "", "large", np.zeros(1 << 21, np.uint8))
    large = store.find("", "large")
    assert mapped.open(large.path, large.digest).nbytes == 1 << 21
    assert len(os.listdir("/proc/self/fd")) <= before + 1 and len(mapped.cache) == 301


def test_a_tenant_keeps_so_much_and_no_more(tmp_path: Path):
    store = BufferStore(tmp_path, tenant_bytes=100)
    put(store, "acme", "a", np.zeros(60, np.uint8))
    put(store, "acme", "a", np.zeros(90, np.uint8))  # another value of the same
    with pytest.raises(BuffersFull) as caught:
        put(store, "acme", "b", np.zeros(11, np.uint8))
    assert caught.value.hint and store.used_bytes("acme") == 90
    assert len(list(tmp_path.glob("*/*"))) == 1, "what was refused left no file"
    put(store, "other", "b", np.zeros(100, np.uint8))


def test_without_a_folder_nothing_is_left_behind():
    store = BufferStore()
    put(store, "", "k", np.zeros(1))
    folder = Path(store.find("", "k").path).parent.parent
    store.close()
    assert not folder.exists()


def test_a_graph_reads_and_leaves_buffers_of_this_process(tmp_path: Path):
    path = tmp_path / "graphs.py"
    path.write_text(SOURCE)
    from lamina.sdk.app_loader import load_app

    app = load_app(str(path))
    classify = app.functions["classify"]
    app.local_buffers.write(0, "p", np.array([[0, 1], [5, 2]], np.float32))
    found = classify.local(pixels={"key": "p"}, score={"key": "out"})
    assert found == {"score": {"key": "out"}, "best": 2}
    assert app.local_buffers.read(0, "out").tolist() == [0, 1, 5, 2]
    app.local_buffers.write(0, "turned", np.eye(4, dtype=np.float32)[::-1])
    assert classify.local(pixels={"key": "p"}, weights={"key": "turned"})["best"] == 1
    with pytest.raises(BadValue, match=r"under key 'out' is float32 \[4\]"):
        classify.local(pixels={"key": "out"})
    with pytest.raises(NotFound):
        classify.local(pixels={"key": "none"})
    app.close()


@pytest.mark.live
def test_clients_send_keys_instead_of_arrays(tmp_path: Path):
    path = tmp_path / "graphs.py"
    path.write_text(SOURCE)

    def use(url: str) -> None:
        with lamina.Client(url) as client:
            pixels = np.array([[0, 1], [5, 2]], np.float32)
            assert client.put_buffer("p/1", pixels)["bytes"] == 16
            assert client.call("classify", {"pixels": {"key": "p/1"}})["best"] == 2
            left = client.call("classify", {"pixels": {"key": "p/1"}, "score": {"key": "s/1"}})
            assert left == {"score": {"key": "s/1"}, "best": 2}
            assert client.get_buffer("s/1").tolist() == [0, 1, 5, 2]
            assert client.call("classify", {"pixels": {"key": "p/1"}, "best": {"key": "b/1"}})["best"] == {"key": "b/1"}
            assert client.get_buffer("b/1").tolist() == 2  # an output without axes, as in the documentation
            client.put_buffer("p/1", pixels[::-1])
            assert client.call("classify", {"pixels": {"key": "p/1"}})["best"] == 0
            client.put_buffer("w", np.eye(4, dtype=np.float32)[::-1])
            assert client.call("classify", {"pixels": {"key": "p/1"}, "weights": {"key": "w"}})["best"] == 3
            assert [one["key"] for one in client.buffers()["buffers"]] == ["b/1", "p/1", "s/1", "w"]
            client.delete_buffer("p/1")
            with pytest.raises(lamina.errors.LaminaError, match="no buffer under key 'p/1'"):
                client.call("classify", {"pixels": {"key": "p/1"}})

    async def play() -> None:
        gateway = await open_gateway(open_local(str(path), buffers=tmp_path))
        try:
            await asyncio.to_thread(use, gateway.url)
            async with Browser(gateway.port) as browser:
                raw = await browser.ask("PUT", "/v1/buffers/r?dtype=uint8&shape=2,2", b"abcd", "application/octet-stream")
                assert raw.status == 200 and raw.json["shape"] == [2, 2]
                back = await browser.ask("GET", "/v1/buffers/r")
                assert back.body == b"abcd" and back.headers["lamina-shape"] == "2,2"
                for where, body, said in (
                    ("r?dtype=uint8&shape=2,3", b"abcd", "4 bytes, uint8 [2, 3] has 6"),
                    ("r?dtype=uint9&shape=4", b"abcd", "dtype: 'uint9'"),
                    ("r?dtype=uint8&shape=x", b"abcd", "shape: 'x'"),
                    ("..%2Fr?dtype=uint8&shape=4", b"abcd", "no key"),
                ):
                    bad = await browser.ask("PUT", f"/v1/buffers/{where}", body, "application/octet-stream")
                    assert bad.status == 400 and said in bad.json["detail"] and bad.json["hint"], bad.body
        finally:
            await gateway.stop()
        assert (tmp_path / "graphs.buffers").is_dir()

    asyncio.run(play())


@pytest.mark.parametrize("shape", ["4.0", "x", "4,", ",4", "1_0", "+4", " 4", "\uff14", "9" * 30, ",".join("1" * 99)])
def test_a_shape_that_is_none_is_told_as_it_was_sent(shape: str):
    with pytest.raises(BadValue, match="is none") as caught:
        _shape(shape)
    assert caught.value.hint and (_shape("2,3"), _shape("")) == ((2, 3), ())


class Answers:
    """The gateway's end: what it answers, look by look."""

    def __init__(self, *found: object) -> None:
        self.found, self.looks = list(found), 0

    def read_buffer(self, job_id: int, key: str) -> object:
        self.looks += 1
        return self.found.pop(0) if len(self.found) > 1 else self.found[0]


def test_a_buffer_that_is_deleted_or_replaced_before_it_is_opened_is_asked_for_again(tmp_path: Path):
    store, mapped = BufferStore(tmp_path), MappedBuffers(1 << 20)
    put(store, "", "k", np.arange(3.0))
    kept = store.find("", "k")
    gone = (str(tmp_path / "gone.buffer"), "0" * 32)
    link = Answers(gone, gone, (kept.path, kept.digest))
    buffers = BatchBuffers(link, RunBatch(1, 1, [JobFrame(7, "c", None, [])]), [0], lambda: mapped, None)  # type: ignore[arg-type]
    assert buffers.read(0, "k").tolist() == [0, 1, 2] and link.looks == 3
    with pytest.raises(BadValue, match="replaced again and again"):
        BatchBuffers(Answers(gone), RunBatch(1, 1, [JobFrame(7, "c", None, [])]), [0], lambda: mapped, None).read(0, "k")  # type: ignore[arg-type]


def test_a_disk_without_room_for_one_more_file_is_told_as_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(**how: object) -> None:
        raise OSError(errno.ENOSPC, "no inodes")

    monkeypatch.setattr("tempfile.mkstemp", full)
    with pytest.raises(BuffersFull, match="disk of the server is full"):
        BufferStore(tmp_path).write("", "k", "uint8", (1,), b"x")
