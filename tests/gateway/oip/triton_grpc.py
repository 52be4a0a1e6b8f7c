"""tritonclient over gRPC, with and without asyncio, as it comes: `python -m tests.gateway.oip.triton_grpc HOST:PORT`."""

from __future__ import annotations

import queue
import sys
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import tritonclient.grpc as rpc
import tritonclient.grpc.aio as rpc_aio
from tritonclient.utils import InferenceServerException

from tests.gateway.oip.operations import fails, operation, run_all
from tests.gateway.oip.samples import arrays, same

URL = sys.argv[1]
client = rpc.InferenceServerClient(URL)
ONE = np.arange(16, dtype=np.int32).reshape(1, 16)


def put(name: str, array: np.ndarray, dtype: str) -> rpc.InferInput:
    given = rpc.InferInput(name, list(array.shape), dtype)
    given.set_data_from_numpy(array)
    return given


def simple() -> list[rpc.InferInput]:
    return [put("a", ONE, "INT32"), put("b", ONE, "INT32")]


def check_simple(result: rpc.InferResult) -> None:
    assert same(result.as_numpy("total"), 2 * ONE)
    assert same(result.as_numpy("difference"), 0 * ONE)


@operation
def health() -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("simple", "1")


@operation
def server_metadata() -> None:
    assert client.get_server_metadata().name == "lamina"


@operation
def model_metadata() -> None:
    metadata = client.get_model_metadata("double", as_json=True)
    assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": ["-1", "4"]}]


@operation
def model_config() -> None:
    config = client.get_model_config("double").config
    assert config.max_batch_size == 16
    assert config.input[0].data_type == 11  # TYPE_FP32


@operation
def repository_index() -> None:
    assert "simple" in [model.name for model in client.get_model_repository_index().models]


@operation
def infer() -> None:
    check_simple(client.infer("simple", simple(), request_id="mine"))


@operation
def infer_a_str() -> None:
    result = client.infer("greet", [put("prompt", np.array(["you"], dtype=np.object_), "BYTES")])
    assert result.as_numpy("output").tolist() == [b"hello you"]


@operation
def infer_compressed() -> None:
    check_simple(client.infer("simple", simple(), compression_algorithm="gzip"))


@operation
def infer_of_every_dtype() -> None:
    given = arrays()
    result = client.infer("every", [put(f"x_{dtype.lower()}", array, dtype) for dtype, array in given.items()])
    for dtype, array in given.items():
        assert same(result.as_numpy(f"x_{dtype.lower()}"), array), dtype


@operation
def infer_of_typed_contents() -> None:
    """With the bare stub: the client itself always sends raw contents."""
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    typed = service_pb2.ModelInferRequest(model_name="simple")
    for name in ("a", "b"):
        typed.inputs.add(name=name, datatype="INT32", shape=[1, 16]).contents.int_contents.extend(ONE.ravel().tolist())
    response = service_pb2_grpc.GRPCInferenceServiceStub(client._channel).ModelInfer(typed)
    assert response.raw_output_contents[0] == (2 * ONE).tobytes()


@operation
def infer_a_batch() -> None:
    rows = np.random.default_rng(1).random((40, 4), np.float32)
    assert same(client.infer("double", [put("x", rows, "FP32")]).as_numpy("output"), 2 * rows)


@operation
def infer_one_output() -> None:
    result = client.infer("simple", simple(), outputs=[rpc.InferRequestedOutput("difference")])
    assert result.as_numpy("total") is None


@operation
def infer_without_waiting() -> None:
    said: queue.Queue[Any] = queue.Queue()
    for _ in range(8):
        client.async_infer("simple", simple(), lambda result, error: said.put((result, error)))
    for _ in range(8):
        result, error = said.get(timeout=20)
        assert error is None, error
        check_simple(result)


@operation
def a_timeout_is_a_deadline() -> None:
    client.infer("slow", [put("x", np.array([0.05], np.float32), "FP32")])
    late = [put("x", np.array([0.3], np.float32), "FP32")]
    fails(lambda: client.infer("slow", late, timeout=20_000), InferenceServerException)
    fails(lambda: client.infer("slow", late, client_timeout=0.02), InferenceServerException)


@operation
def priorities_are_taken() -> None:
    check_simple(client.infer("simple", simple(), priority=2, timeout=30_000_000))


@operation
def statistics() -> None:
    assert client.get_inference_statistics("simple").model_stats[0].inference_stats.success.count > 5


@operation
def unload_and_load() -> None:
    client.unload_model("shout")
    assert not client.is_model_ready("shout")
    client.load_model("shout")
    assert client.is_model_ready("shout")
    assert not client.is_model_ready("nobody")


@operation
def errors_have_codes() -> None:
    fails(
        lambda: client.infer("simple", [put("a", ONE[:, :3], "INT32"), simple()[1]]), InferenceServerException, "INVALID_ARGUMENT"
    )
    fails(lambda: client.infer("nobody", simple()), InferenceServerException, "NOT_FOUND")
    fails(lambda: client.get_model_metadata("simple", "7"), InferenceServerException, "NOT_FOUND")


def streamed(model: str, inputs: list[rpc.InferInput], times: int, **options: Any) -> list[Any]:
    said: queue.Queue[Any] = queue.Queue()
    own = rpc.InferenceServerClient(URL)
    own.start_stream(lambda result, error: said.put((result, error)))
    own.async_stream_infer(model, inputs, **options)
    found = [said.get(timeout=20) for _ in range(times)]
    own.stop_stream()
    own.close()
    return found


@operation
def a_stream_of_one() -> None:
    [(result, error)] = streamed("simple", simple(), 1)
    assert error is None, error
    check_simple(result)


@operation
def a_stream_of_pieces() -> None:
    pieces = streamed("count", [put("n", np.array([3], np.int32), "INT32")], 4, enable_empty_final_response=True)
    assert [error for _, error in pieces] == [None] * 4
    assert [result.as_numpy("output").tolist() for result, _ in pieces[:3]] == [[0], [1], [2]]
    assert pieces[3][0].get_response().parameters["triton_final_response"].bool_param


@operation
def an_error_in_a_stream() -> None:
    [(result, error)] = streamed("simple", [put("a", ONE[:, :3], "INT32")], 1)
    assert result is None
    assert "shape [1, 3]" in str(error)


@operation
async def asyncio_infer() -> None:
    async with rpc_aio.InferenceServerClient(URL) as own:
        assert await own.is_server_ready()
        assert (await own.get_model_metadata("simple")).name == "simple"
        check_simple(await own.infer("simple", simple()))


@operation
async def asyncio_stream() -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        for number in (2, 3):
            yield {"model_name": "count", "inputs": [put("n", np.array([number], np.int32), "INT32")], "request_id": str(number)}

    async with rpc_aio.InferenceServerClient(URL) as own:
        found: dict[str, list[int]] = {"2": [], "3": []}
        async for result, error in own.stream_infer(requests()):
            assert error is None, error
            found[result.get_response().id] += result.as_numpy("output").tolist()
        assert found == {"2": [0, 1], "3": [0, 1, 2]}


if __name__ == "__main__":
    run_all()
