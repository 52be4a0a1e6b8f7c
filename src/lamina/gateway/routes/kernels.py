"""Routes of kernel graphs, `/v1/kernels`, and of the buffers they name by key, `/v1/buffers`.

Graphs are found by content hash, and called without knowing which app registered them. Buffers are the caller's tenant's: put,
read and deleted by key. Files are written and read in threads: the loop never waits for a disk.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, TypeVar

import msgspec

from lamina import encoding
from lamina.access.authorization import Grant
from lamina.errors import BadValue, LaminaError, NotFound
from lamina.gateway.routes import http_codec
from lamina.gateway.routes.calls import CallHandler
from lamina.gateway.routes.problems import answered
from lamina.gateway.routes.targets import CallTarget, TargetRegistry
from lamina.kernels.buffer_store import BufferStore, StoredBuffer, check_array, read_data
from lamina.kernels.validation import checked_key
from lamina.sdk.tensors import Port
from lamina.server.exchange import Exchange, HttpRequest
from lamina.server.memory_budget import MemoryBudget, MemoryCharge
from lamina.server.process_status import ProcessStatus

T = TypeVar("T")
MAX_LISTED = 1_000
_LENGTHS = re.compile(r"-?[0-9]{1,20}(,-?[0-9]{1,20}){0,15}")
THREADS = 4
MAX_WAITING = 64
"""Requests that wait for the disk."""


class BuffersBusy(LaminaError):
    """Too many buffers are written and read at once."""

    status = 503
    code: ClassVar[str] = "buffers-busy"


class KernelRoutes:
    """Routes of graphs. Where several functions have the same graph, that of the caller's tenant answers, else the first."""

    def __init__(self, targets: TargetRegistry, call_handler: CallHandler, process: ProcessStatus) -> None:
        self._targets, self._call_handler, self._process = targets, call_handler, process
        self.routes: dict[str, Callable[..., None]] = {
            "GET /v1/kernels": self._list,
            "GET /v1/kernels/{graph}": self._get,
            "POST /v1/kernels/{graph}": self._call,
        }

    def _list(self, request: HttpRequest, exchange: Exchange, grant: Grant) -> None:
        seen = [_describe(one) for one in self._targets.all if _graph(one) and grant.sees(one.tenant)]
        exchange.respond(200, msgspec.json.encode(seen))

    def _get(self, request: HttpRequest, exchange: Exchange, grant: Grant, graph: str) -> None:
        exchange.respond(200, msgspec.json.encode(_describe(self._find(graph, grant))))

    def _call(self, request: HttpRequest, exchange: Exchange, grant: Grant, graph: str) -> None:
        if self._process.refusal is not None:  # it stops
            raise self._process.refusal()
        self._call_handler.handle(self._find(graph, grant), request, exchange, grant.caller)

    def _find(self, graph: str, grant: Grant) -> CallTarget:
        found = [one for one in self._targets.all if _graph(one) == graph and grant.sees(one.tenant)]
        if not found or not graph:
            raise NotFound(f"no kernel graph {graph[:80]!r}", hint="GET /v1/kernels lists those that are registered")
        return max(found, key=lambda one: one.tenant == grant.tenant)


BUCKETS = "bucket"
"""First part of the keys of objects in buckets."""


class BufferRoutes:
    """Routes of buffers. A body is the array itself in C order, with its dtype and shape behind the `?`; or an encoded value."""

    def __init__(self, store: BufferStore, budget: MemoryBudget) -> None:
        self._store = store
        self._budget = budget
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="buffers")
        self._waiting = 0
        self.routes: dict[str, Callable[..., None]] = {
            "GET /v1/buffers": self._list,
            "GET /v1/buffers/{buffer*}": self._get,
            "PUT /v1/buffers/{buffer*}": self._put,
            "DELETE /v1/buffers/{buffer*}": self._delete,
            "GET /v1/buckets": self._list_buckets,
            "GET /v1/buckets/{bucket}": self._list_objects,
            "GET /v1/buckets/{bucket}/{object*}": self._get_object,
            "PUT /v1/buckets/{bucket}/{object*}": self._put_object,
            "DELETE /v1/buckets/{bucket}/{object*}": self._delete_object,
        }

    def _list(self, request: HttpRequest, exchange: Exchange, grant: Grant) -> None:
        query = http_codec.parse_query(request, ("prefix", "after"))
        found = self._store.list(grant.tenant, query.get("prefix", ""), query.get("after", ""), MAX_LISTED + 1)
        more = found[MAX_LISTED - 1].key if len(found) > MAX_LISTED else None
        exchange.respond(200, msgspec.json.encode({"buffers": [_shown(one) for one in found[:MAX_LISTED]], "next": more}))

    def _get(self, request: HttpRequest, exchange: Exchange, grant: Grant, key: str) -> None:
        stored = self._store.find(grant.tenant, key)
        as_value = http_codec.VALUE in request.header(b"accept")

        def read() -> bytes:
            data = read_data(stored)
            return encoding.encode_tensor(stored.dtype, stored.shape, data) if as_value else data

        def respond(data: bytes) -> None:
            about = f'etag: "{stored.digest}"\r\nlamina-dtype: {stored.dtype}\r\n'
            about += f"lamina-shape: {','.join(map(str, stored.shape))}\r\n"
            exchange.respond(200, data, http_codec.VALUE if as_value else http_codec.BYTES, about.encode())

        self._in_thread(exchange, self._room_for(stored, exchange, grant), read, respond)

    def _put(self, request: HttpRequest, exchange: Exchange, grant: Grant, key: str) -> None:
        http_codec.check_encoding(request)
        kind = request.header(b"content-type").partition(b";")[0].strip().lower()
        query = http_codec.parse_query(request, ("dtype", "shape"))
        dtype, shape, tenant = query.get("dtype", ""), _shape(query.get("shape", "")), grant.tenant
        data: encoding.Blob = request.body
        if kind == http_codec.VALUE:  # looked at as it is: to decode whatever a client sends would take long
            dtype, shape, data = _array_parts(request.body)
        check_array(dtype, shape, len(data))
        self._store.check_room(tenant, checked_key(key), len(data))

        def respond(written: StoredBuffer) -> None:
            exchange.respond(200, msgspec.json.encode(_shown(self._store.commit(written))))

        charge = self._budget.charge("buffers", len(request.body))
        self._in_thread(exchange, charge, lambda: self._store.write(tenant, key, dtype, shape, data), respond)

    def _delete(self, request: HttpRequest, exchange: Exchange, grant: Grant, key: str) -> None:
        self._store.remove(grant.tenant, key)
        exchange.respond(204, b"", http_codec.BYTES)

    # -------------------------------------------------------------------- buckets

    def _list_buckets(self, request: HttpRequest, exchange: Exchange, grant: Grant) -> None:
        after = http_codec.parse_query(request, ("after",)).get("after", "")
        found = self._store.folders(grant.tenant, BUCKETS, after, MAX_LISTED)
        exchange.respond(200, msgspec.json.encode([{"bucket": name, "objects": count} for name, count in found.items()]))

    def _list_objects(self, request: HttpRequest, exchange: Exchange, grant: Grant, bucket: str) -> None:
        query = http_codec.parse_query(request, ("prefix", "after"))
        root = _object_key(bucket, "")
        after = root + query["after"] if query.get("after") else ""
        found = self._store.list(grant.tenant, root + query.get("prefix", ""), after, MAX_LISTED + 1)
        shown = [{"key": one.key[len(root) :], "bytes": one.nbytes, "digest": one.digest} for one in found[:MAX_LISTED]]
        more = shown[-1]["key"] if len(found) > MAX_LISTED else None
        exchange.respond(200, msgspec.json.encode({"bucket": bucket, "objects": shown, "next": more}))

    def _get_object(self, request: HttpRequest, exchange: Exchange, grant: Grant, bucket: str, name: str) -> None:
        try:
            stored = self._store.find(grant.tenant, _object_key(bucket, name))
        except NotFound:
            what = f"no object {name[:80]!r} in bucket {bucket[:80]!r}"
            raise NotFound(what, hint=f"GET /v1/buckets/{bucket[:80]} lists what is there") from None

        def respond(data: bytes) -> None:
            kind = encoding.sniff_type(data).encode()
            exchange.respond(200, data, kind, f'etag: "{stored.digest}"\r\n'.encode())

        self._in_thread(exchange, self._room_for(stored, exchange, grant), lambda: read_data(stored), respond)

    def _put_object(self, request: HttpRequest, exchange: Exchange, grant: Grant, bucket: str, name: str) -> None:
        http_codec.check_encoding(request)
        key, tenant, data = _object_key(bucket, name), grant.tenant, request.body
        if not data:
            raise BadValue("body: an object has at least one byte", hint="send its content; DELETE removes it")
        self._store.check_room(tenant, checked_key(key), len(data))

        def respond(written: StoredBuffer) -> None:
            stored = self._store.commit(written)
            exchange.respond(200, msgspec.json.encode({"key": name, "bytes": stored.nbytes, "digest": stored.digest}))

        charge = self._budget.charge("buffers", len(data))
        self._in_thread(exchange, charge, lambda: self._store.write(tenant, key, "uint8", (len(data),), data), respond)

    def _delete_object(self, request: HttpRequest, exchange: Exchange, grant: Grant, bucket: str, name: str) -> None:
        self._store.remove(grant.tenant, _object_key(bucket, name))
        exchange.respond(204, b"", http_codec.BYTES)

    def _room_for(self, stored: StoredBuffer, exchange: Exchange, grant: Grant) -> MemoryCharge:
        """Room for what is to be read, in the share of its reader: found before it is read."""
        return self._budget.charge("buffers", stored.nbytes, exchange.address, grant.tenant)

    def _in_thread(self, exchange: Exchange, charge: MemoryCharge, work: Callable[[], T], then: Callable[[T], None]) -> None:
        """Work in a thread, and respond with what came of it. The bytes count as held until then, whether or not the client is
        still there; and no more than so many requests wait for a thread."""
        if self._waiting >= MAX_WAITING:
            charge.release()
            raise BuffersBusy(f"{self._waiting} requests for buffers wait for the disk", hint="try again in a moment")
        self._waiting += 1

        def ended(future: asyncio.Future[T]) -> None:
            self._waiting -= 1
            charge.release()
            then(future.result())

        done = answered(exchange, ended)
        asyncio.get_running_loop().run_in_executor(self._threads, work).add_done_callback(done)


def _object_key(bucket: str, name: str) -> str:
    """Key of an object: objects are buffers of bytes, each bucket below a name of its own."""
    if not bucket or "/" in bucket:
        raise BadValue(f"bucket: {bucket[:80]!r} is no name", hint="up to 60 of A-Z a-z 0-9 . _ -")
    return f"{BUCKETS}/{bucket}/{name}"


def _array_parts(body: bytes) -> tuple[str, tuple[int, ...], memoryview]:
    """Dtype, shape and bytes of an encoded array."""
    try:
        parts = encoding.tensor_parts(body)
    except (msgspec.MsgspecError, ValueError, IndexError) as error:
        raise BadValue(f"body: not an array: {error}", hint="send one encoded array") from None
    if parts is None:
        raise BadValue("body: not an array", hint="send one encoded array")
    dtype, shape, data = parts
    return dtype, tuple(shape), data


def _shape(text: str) -> tuple[int, ...]:
    if text and not _LENGTHS.fullmatch(text):
        raise BadValue(f"shape: {text[:40]!r} is none", hint="lengths with commas between them: 2,224,224")
    return tuple(int(part) for part in text.split(",")) if text else ()


def _shown(stored: StoredBuffer) -> dict[str, Any]:
    about = {"dtype": stored.dtype, "shape": list(stored.shape), "bytes": stored.nbytes, "digest": stored.digest}
    return {"key": stored.key, **about}


def _graph(target: CallTarget) -> str:
    return target.signature.graph if target.signature is not None else ""


def _describe(target: CallTarget) -> dict[str, Any]:
    assert target.signature is not None
    taken = {port.name for port in target.signature.inputs}
    return {
        "graph": target.signature.graph,
        "function": target.name,
        "inputs": [_port(port) for port in target.signature.inputs],
        "outputs": [_port(port) for port in target.signature.outputs],
        "keys": [param.name for param in target.params if param.name not in taken],
        "slo_ms": target.slo.latency_us / 1000 or None,
        "doc": target.doc,
    }


def _port(port: Port) -> dict[str, Any]:
    assert port.tensor is not None
    return {"name": port.name, "dtype": port.tensor.dtype, "shape": list(port.tensor.shape)}
