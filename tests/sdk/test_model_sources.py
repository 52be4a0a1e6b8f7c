"""Model sources: addresses through a cache, with checksums; folders of MLflow and Hugging Face as they lie on disk."""

from __future__ import annotations

import errno
import hashlib
import http.server
import json
import multiprocessing
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import lamina
from lamina.errors import BadValue, LoadFailed
from lamina.sdk import model_sources
from lamina.sdk.model_bundle import parse_model_option
from lamina.sdk.model_sources import fetch_model, model_file, shown

BODY = b"a model of some bytes " * 1_000
SUM = hashlib.sha256(BODY).hexdigest()


@dataclass
class FileServer:
    """An HTTP server with one file, that can be told to misbehave."""

    url: str = ""
    body: bytes = BODY
    asked: list[str] = field(default_factory=list)  #: status of every answer
    cuts: int = 0  #: so many answers end in the middle
    fails: int = 0  #: so many answers are 503
    length: int | None = None  #: what it says; None: the truth


@pytest.fixture
def server() -> Iterator[FileServer]:
    made = FileServer()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            etag = f'"{hashlib.md5(made.body).hexdigest()}"'
            if made.fails:
                made.fails -= 1
                made.asked.append("503")
                self.send_error(503)
                return
            if self.path.startswith("/missing"):
                made.asked.append("404")
                self.send_error(404)
                return
            if self.headers.get("if-none-match") == etag:
                made.asked.append("304")
                self.send_response(304)
                self.end_headers()
                return
            made.asked.append("200")
            self.send_response(200)
            self.send_header("content-length", str(made.length if made.length is not None else len(made.body)))
            self.send_header("etag", etag)
            self.send_header("connection", "close")
            self.end_headers()
            is_cut = made.cuts > 0
            made.cuts -= is_cut
            self.wfile.write(made.body[: len(made.body) // 2] if is_cut else made.body)
            self.close_connection = True

        def log_message(self, *_: Any) -> None:
            pass

    listener = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.url = f"http://127.0.0.1:{listener.server_address[1]}/models/net.onnx"
    thread = threading.Thread(target=listener.serve_forever, args=(0.01,), daemon=True)  # a shutdown waits for its poll
    thread.start()
    try:
        yield made
    finally:
        listener.shutdown()
        listener.server_close()
        thread.join()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LAMINA_MODEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(model_sources.time, "sleep", lambda seconds: None)
    return tmp_path / "cache"


def left_over(cache: Path) -> list[str]:
    return [one.name for one in cache.rglob(".part-*")]


def test_a_file_is_fetched_once_and_looked_at_again(server: FileServer) -> None:
    first, second = fetch_model(server.url), fetch_model(server.url)
    assert first == second and first.name == "net.onnx" and first.read_bytes() == BODY
    assert server.asked == ["200", "304"]


@pytest.mark.parametrize("name", ["source.json", ".source.json", ".lock"])
def test_a_model_may_have_any_name(server: FileServer, name: str) -> None:
    url = server.url.replace("net.onnx", name)
    assert fetch_model(url).read_bytes() == BODY
    assert fetch_model(url).read_bytes() == BODY
    assert server.asked == ["200", "304"]


def test_with_its_checksum_in_the_cache_the_server_is_not_asked(server: FileServer) -> None:
    fetch_model(server.url, sha256=SUM)
    assert fetch_model(server.url, sha256=SUM.upper()).read_bytes() == BODY
    assert server.asked == ["200"]


def test_a_file_that_has_changed_is_fetched_again(server: FileServer) -> None:
    fetch_model(server.url)
    server.body = b"another"
    assert fetch_model(server.url).read_bytes() == b"another"


def test_a_wrong_checksum_is_refused_and_nothing_is_kept(server: FileServer, cache: Path) -> None:
    with pytest.raises(BadValue, match=f"its sha256 is {SUM}"):
        fetch_model(server.url, sha256="0" * 64)
    assert left_over(cache) == [] and not list(cache.rglob("net.onnx"))


def test_a_download_that_is_cut_off_is_tried_again(server: FileServer, cache: Path) -> None:
    server.cuts = 2
    assert fetch_model(server.url).read_bytes() == BODY and left_over(cache) == []


def test_one_that_is_always_cut_off_fails_and_leaves_nothing(server: FileServer, cache: Path) -> None:
    server.cuts = 99
    with pytest.raises(LoadFailed, match="cut off"):
        fetch_model(server.url)
    assert left_over(cache) == []


def test_a_server_that_does_not_answer_leaves_the_copy_of_before(server: FileServer) -> None:
    fetch_model(server.url)
    server.fails = 99
    assert fetch_model(server.url).read_bytes() == BODY


def test_what_is_not_there_is_said_without_another_try(server: FileServer) -> None:
    with pytest.raises(LoadFailed, match="it answered 404"):
        fetch_model(server.url.replace("/models/", "/missing/"))
    assert server.asked == ["404"]


def test_a_file_larger_than_the_disk_is_refused_before_it_is_read(server: FileServer, cache: Path) -> None:
    server.length = 2**62
    with pytest.raises(LoadFailed, match="more than"):
        fetch_model(server.url)
    server.length = model_sources.MAX_BYTES - 1
    if model_sources.shutil.disk_usage("/").free < model_sources.MAX_BYTES:
        with pytest.raises(LoadFailed, match=r"and .* has"):
            fetch_model(server.url)
    assert left_over(cache) == []


def test_a_disk_that_fills_up_is_said_and_nothing_is_left(
    server: FileServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(model_sources.os, "fsync", full)
    with pytest.raises(LoadFailed, match="no room"):
        fetch_model(server.url)
    assert left_over(cache) == []


def test_what_a_killed_process_has_left_is_removed(server: FileServer, cache: Path) -> None:
    fetch_model(server.url)
    folder = next(cache.iterdir())
    (folder / ".part-dead").write_bytes(b"half")
    fetch_model(server.url)
    assert left_over(cache) == []


def _fetch(url: str, out: Any) -> None:
    out.put(fetch_model(url, sha256=SUM).read_bytes() == BODY)


@pytest.mark.live
def test_servers_that_share_a_cache_fetch_once(server: FileServer) -> None:
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    servers = [context.Process(target=_fetch, args=(server.url, out)) for _ in range(3)]
    for one in servers:
        one.start()
    assert [out.get(timeout=120) for _ in servers] == [True] * 3
    for one in servers:
        one.join()
    assert server.asked == ["200"]


def test_passwords_and_signatures_are_not_shown() -> None:
    assert shown("https://user:secret@host/m.onnx?X-Signature=abc") == "https://host/m.onnx"


def test_a_model_option_takes_an_address_with_a_checksum(server: FileServer) -> None:
    entry = parse_model_option(f"net={server.url},sha256={SUM},slo=50ms")
    assert (entry.name, entry.slo, Path(entry.path).read_bytes()) == ("net", "50ms", BODY)
    with pytest.raises(BadValue, match="its sha256 is"):
        parse_model_option(f"net={server.url},sha256={'1' * 64}")


def test_a_file_on_disk_may_have_a_checksum_too(tmp_path: Path) -> None:
    file = tmp_path / "a.onnx"
    file.write_bytes(BODY)
    assert fetch_model(file, sha256=SUM) == file
    with pytest.raises(BadValue, match="its sha256 is"):
        fetch_model(file, sha256="2" * 64)
    with pytest.raises(BadValue, match="is no SHA-256"):
        fetch_model(file, sha256="abc")


# ---------------------------------------------------------------------- object stores


def test_other_schemes_go_through_fsspec(cache: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    memory.pipe("/bucket/net.onnx", BODY)
    memory.pipe("/bucket/hf/config.json", b"{}")
    memory.pipe("/bucket/hf/onnx/model.onnx", BODY)
    assert fetch_model("memory://bucket/net.onnx", sha256=SUM).read_bytes() == BODY
    folder = fetch_model("memory://bucket/hf/")
    assert model_file(folder).read_bytes() == BODY
    with pytest.raises(LoadFailed, match="not there"):
        fetch_model("memory://bucket/nothing.onnx")
    with pytest.raises(BadValue, match="nowhere"):
        fetch_model("nowhere://bucket/x")


class FakeS3(http.server.BaseHTTPRequestHandler):
    """The part of S3 that a reader needs: HEAD and GET of an object, with ranges, and a listing."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        if path == "/bucket/net.onnx":
            body, status = BODY, 200
            extra = {"etag": f'"{SUM[:32]}"', "last-modified": "Wed, 01 Jan 2026 00:00:00 GMT"}
            asked = self.headers.get("range")
            if asked:
                first, _, last = asked.removeprefix("bytes=").partition("-")
                body, status = BODY[int(first) : int(last or len(BODY)) + 1], 206
                extra["content-range"] = f"bytes {first}-{int(first) + len(body) - 1}/{len(BODY)}"
        else:
            body, status, extra = b"<Error><Code>NoSuchKey</Code></Error>", 404, {"content-type": "application/xml"}
        self.send_response(status)
        for name, value in {"content-length": str(len(body)), **extra}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.filterwarnings("ignore")
def test_an_object_store_that_speaks_s3_is_a_source(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs")
    listener = http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeS3)
    thread = threading.Thread(target=listener.serve_forever, args=(0.01,), daemon=True)  # a shutdown waits for its poll
    thread.start()
    try:
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{listener.server_address[1]}",
            "AWS_ACCESS_KEY_ID": "k",
            "AWS_SECRET_ACCESS_KEY": "s",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)
        assert fetch_model("s3://bucket/net.onnx", sha256=SUM).read_bytes() == BODY
        with pytest.raises(LoadFailed, match="not there"):
            fetch_model("s3://bucket/other.onnx")
    finally:
        listener.shutdown()
        listener.server_close()
        thread.join()


# ----------------------------------------------------------------------- model folders

MLMODEL = """
artifact_path: model
flavors:
  onnx:
    data: {data}
    onnx_version: 1.16.0
    providers:
    - CPUExecutionProvider
  python_function:
    loader_module: mlflow.onnx
model_uuid: 1
"""


def test_the_onnx_flavour_of_an_mlflow_folder_is_served(tmp_path: Path) -> None:
    (tmp_path / "MLmodel").write_text(MLMODEL.format(data="model.onnx"))
    (tmp_path / "model.onnx").write_bytes(BODY)
    assert model_file(tmp_path) == (tmp_path / "model.onnx").resolve()


def test_an_mlflow_folder_that_points_out_of_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "other.onnx").write_bytes(BODY)
    (tmp_path / "model" / "MLmodel").write_text(MLMODEL.format(data="../other.onnx"))
    with pytest.raises(BadValue, match="no file"):
        model_file(tmp_path / "model")


@pytest.mark.parametrize(("flavour", "way"), [("pytorch", "torch.export"), ("sklearn", "skl2onnx"), ("xgboost", "mlflow.onnx")])
def test_pickles_of_mlflow_are_refused_with_a_way_out(tmp_path: Path, flavour: str, way: str) -> None:
    (tmp_path / "MLmodel").write_text(f"flavors:\n  {flavour}:\n    model_data: data\n  python_function:\n    env: conda.yaml\n")
    with pytest.raises(BadValue, match=f"'{flavour}' is a pickle") as caught:
        model_file(tmp_path)
    assert way in caught.value.hint


def test_a_pickle_of_hugging_face_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(BadValue, match=r"pytorch_model\.bin is a pickle"):
        model_file(tmp_path)


def test_an_onnx_export_comes_before_weights(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    assert model_file(tmp_path).name == "model.safetensors"
    (tmp_path / "onnx").mkdir()
    (tmp_path / "onnx" / "model.onnx").write_bytes(b"x")
    assert model_file(tmp_path) == tmp_path / "onnx" / "model.onnx"


def test_a_folder_with_several_models_says_which(tmp_path: Path) -> None:
    for name in ("a.onnx", "b.pt2"):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(BadValue, match="2 model files") as caught:
        model_file(tmp_path)
    assert "a.onnx, b.pt2" in caught.value.hint


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_hugging_face_folder_answers_as_the_library_does(tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    import numpy as np

    from lamina.sdk.model_bundle import add_model

    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
        id2label={0: "a", 1: "b", 2: "c"},
    )
    model = transformers.BertForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path / "bert")
    assert json.loads((tmp_path / "bert" / "config.json").read_text())["architectures"] == ["BertForSequenceClassification"]
    app = lamina.App("models")
    add_model(app, parse_model_option(f"bert={tmp_path / 'bert'}"))
    ids, mask = np.array([3, 7, 9]), np.ones(3, np.int64)
    with torch.inference_mode():
        wanted = model(input_ids=torch.tensor([ids.tolist()]), attention_mask=torch.ones(1, 3, dtype=torch.int64)).logits[0]
    found = app.functions["bert"].local(input_ids=ids, attention_mask=mask)
    assert np.allclose(np.asarray(found), wanted.numpy(), atol=1e-5)
    assert os.path.exists(tmp_path / "bert" / "model.safetensors")
