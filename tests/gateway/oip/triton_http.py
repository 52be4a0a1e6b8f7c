"""tritonclient over HTTP, with and without asyncio, as it comes: `python -m tests.gateway.oip.triton_http HOST:PORT`."""

from __future__ import annotations

import sys

import numpy as np
import tritonclient.http as http
import tritonclient.http.aio as http_aio
from tritonclient.utils import InferenceServerException

from tests.gateway.oip.operations import fails, operation, run_all
from tests.gateway.oip.samples import arrays, same

URL = sys.argv[1]
client = http.InferenceServerClient(URL, concurrency=8)
ONE = np.arange(16, dtype=np.int32).reshape(1, 16)


def put(name: str, array: np.ndarray, dtype: str, binary: bool = True) -> http.InferInput:
    given = http.InferInput(name, list(array.shape), dtype)
    given.set_data_from_numpy(array, binary_data=binary)
    return given


def simple(binary: bool = True) -> list[http.InferInput]:
    return [put("a", ONE, "INT32", binary), put("b", ONE, "INT32", binary)]


def check_simple(result: http.InferResult) -> None:
    assert same(result.as_numpy("total"), 2 * ONE)
    assert same(result.as_numpy("difference"), 0 * ONE)


@operation
def server_is_live() -> None:
    assert client.is_server_live()


@operation
def server_is_ready() -> None:
    assert client.is_server_ready()


@operation
def model_is_ready() -> None:
    assert client.is_model_ready("simple")
    assert client.is_model_ready("simple", "1")
    assert not client.is_model_ready("nobody")


@operation
def server_metadata() -> None:
    assert "binary_tensor_data" in client.get_server_metadata()["extensions"]


@operation
def model_metadata() -> None:
    metadata = client.get_model_metadata("double")
    assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]
    assert metadata["versions"] == ["1"]


@operation
def model_config() -> None:
    config = client.get_model_config("double")
    assert config["max_batch_size"] == 16
    assert config["input"][0]["data_type"] == "TYPE_FP32"


@operation
def repository_index() -> None:
    assert {"name": "simple", "version": "1", "state": "READY", "reason": ""} in client.get_model_repository_index()


@operation
def infer_binary() -> None:
    check_simple(client.infer("simple", simple()))


@operation
def infer_json() -> None:
    outputs = [http.InferRequestedOutput(name, binary_data=False) for name in ("total", "difference")]
    check_simple(client.infer("simple", simple(False), outputs=outputs))


@operation
def infer_json_in_binary_out() -> None:
    check_simple(client.infer("simple", simple(False)))


@operation
def infer_one_output() -> None:
    result = client.infer("simple", simple(), outputs=[http.InferRequestedOutput("difference")])
    assert result.as_numpy("total") is None


@operation
def infer_of_every_dtype_in_binary() -> None:
    given = arrays()
    result = client.infer("every", [put(f"x_{dtype.lower()}", array, dtype) for dtype, array in given.items()])
    for dtype, array in given.items():
        assert same(result.as_numpy(f"x_{dtype.lower()}"), array), dtype


@operation
def infer_of_every_dtype_in_json() -> None:
    given = arrays()
    given["BYTES"] = np.array([["", "a", "grün"], ["x", "y", "z"]], dtype=np.object_)
    inputs = [put(f"x_{dtype.lower()}", array, dtype, dtype in ("FP16", "BF16")) for dtype, array in given.items()]
    outputs = [http.InferRequestedOutput(one.name(), binary_data=one.datatype() in ("FP16", "BF16")) for one in inputs]
    result = client.infer("every", inputs, outputs=outputs)
    for dtype, array in given.items():
        back = result.as_numpy(f"x_{dtype.lower()}")
        if dtype == "BYTES":
            assert back.ravel().tolist() == array.ravel().tolist()
        else:
            assert same(back, array), dtype


@operation
def infer_text() -> None:
    result = client.infer("shout", [put("text", np.array([b"one", b"two"], dtype=np.object_), "BYTES")])
    assert result.as_numpy("output").tolist() == [b"ONE", b"TWO"]


@operation
def infer_a_str() -> None:
    for binary in (True, False):
        prompt = put("prompt", np.array(['d\u00fa "1"'], dtype=np.object_), "BYTES", binary)
        (text,) = client.infer("greet", [prompt]).as_numpy("output").tolist()
        assert text == 'hello d\u00fa "1"'.encode()
    rows = put("prompt", np.array([["a"], ["3"]], dtype=np.object_), "BYTES")
    assert client.infer("greet_all", [rows]).as_numpy("output").tolist() == [[b"hello a"], [b"hello 3"]]


@operation
def infer_a_batch() -> None:
    rows = np.random.default_rng(1).random((40, 4), np.float32)
    assert same(client.infer("double", [put("x", rows, "FP32")]).as_numpy("output"), 2 * rows)


@operation
def infer_a_workflow() -> None:
    check_simple(client.infer("again", simple()))


@operation
def infer_with_an_id_and_a_version() -> None:
    result = client.infer("simple", simple(), model_version="1", request_id="mine")
    assert result.get_response()["id"] == "mine"


@operation
def infer_without_waiting() -> None:
    waiting = [client.async_infer("simple", simple()) for _ in range(8)]
    for one in waiting:
        check_simple(one.get_result())


@operation
def infer_with_gzip() -> None:
    check_simple(client.infer("simple", simple(), request_compression_algorithm="gzip", response_compression_algorithm="gzip"))


@operation
def infer_with_deflate() -> None:
    packing = {"request_compression_algorithm": "deflate", "response_compression_algorithm": "deflate"}
    check_simple(client.infer("simple", simple(), **packing))


@operation
def a_timeout_is_a_deadline() -> None:
    client.infer("slow", [put("x", np.array([0.05], np.float32), "FP32")])  # now it is known how long it takes
    late = [put("x", np.array([0.3], np.float32), "FP32")]
    fails(lambda: client.infer("slow", late, timeout=20_000), InferenceServerException)


@operation
def priorities_are_taken() -> None:
    check_simple(client.infer("simple", simple(), priority=1, timeout=30_000_000))


@operation
def statistics() -> None:
    stats = client.get_inference_statistics("simple")["model_stats"][0]
    assert stats["inference_stats"]["success"]["count"] > 5
    assert len(client.get_inference_statistics()["model_stats"]) > 5


@operation
def unload_and_load() -> None:
    client.unload_model("shout")
    assert not client.is_model_ready("shout")
    text = [put("text", np.array([b"x"], dtype=np.object_), "BYTES")]
    fails(lambda: client.infer("shout", text), InferenceServerException, "not loaded")
    client.load_model("shout")
    assert client.infer("shout", text).as_numpy("output").tolist() == [b"X"]


@operation
def wrong_shapes_are_refused() -> None:
    fails(lambda: client.infer("simple", [put("a", ONE[:, :3], "INT32"), simple()[1]]), InferenceServerException, "shape [1, 3]")


@operation
def wrong_dtypes_are_refused() -> None:
    wrong = [put("a", ONE.astype(np.float32), "FP32"), simple()[1]]
    fails(lambda: client.infer("simple", wrong), InferenceServerException, "INT32 is needed")


@operation
def wrong_names_are_refused() -> None:
    fails(lambda: client.infer("simple", [put("c", ONE, "INT32")]), InferenceServerException, "no such input")
    fails(lambda: client.infer("nobody", simple()), InferenceServerException, "no model")
    fails(lambda: client.get_model_metadata("simple", "7"), InferenceServerException, "no version")


@operation
async def asyncio_metadata() -> None:
    async with http_aio.InferenceServerClient(URL) as own:
        assert await own.is_server_live()
        assert (await own.get_model_metadata("simple"))["name"] == "simple"
        assert (await own.get_model_config("simple"))["name"] == "simple"
        assert await own.get_model_repository_index()
        assert await own.get_inference_statistics("simple")


@operation
async def asyncio_infer() -> None:
    async with http_aio.InferenceServerClient(URL) as own:
        check_simple(await own.infer("simple", simple()))
        check_simple(await own.infer("simple", simple(), request_compression_algorithm="gzip"))


if __name__ == "__main__":
    run_all()
