"""kserve's client over REST, as it comes: `python -m tests.gateway.oip.kserve_rest HOST:PORT`."""

from __future__ import annotations

import asyncio
import sys

URL = f"http://{sys.argv[1]}"
sys.argv = sys.argv[:1]  # it reads the command line when it is imported

import numpy as np  # noqa: E402
from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig  # noqa: E402

from tests.gateway.oip.operations import fails, operation, run_all  # noqa: E402

ONE = np.arange(16, dtype=np.int32).reshape(1, 16)


def client() -> InferenceRESTClient:
    return InferenceRESTClient(RESTConfig(protocol="v2"))


def request(binary: bool, columns: int = 16) -> InferRequest:
    inputs = []
    for name in ("a", "b"):
        one = InferInput(name, [1, columns], "INT32")
        one.set_data_from_numpy(ONE[:, :columns], binary_data=binary)
        inputs.append(one)
    return InferRequest("simple", inputs)


@operation
async def server_is_live() -> None:
    assert await client().is_server_live(URL) is True


@operation
async def server_is_ready() -> None:
    assert await client().is_server_ready(URL) is True


@operation
async def model_is_ready() -> None:
    assert await client().is_model_ready(URL, "simple") is True
    assert await client().is_model_ready(URL, "nobody") is False


@operation
async def infer_json() -> None:
    response = await client().infer(URL, request(False), model_name="simple")
    assert response.outputs[0].as_numpy().tolist() == (2 * ONE).tolist()


@operation
async def infer_binary() -> None:
    response = await client().infer(URL, request(True), model_name="simple")
    assert response.outputs[0].as_numpy().tolist() == (2 * ONE).tolist()


@operation
async def infer_a_str() -> None:
    for binary in (True, False):
        prompt = InferInput("prompt", [1], "BYTES")
        prompt.set_data_from_numpy(np.array(["you"], dtype=np.object_), binary_data=binary)
        response = await client().infer(URL, InferRequest("greet", [prompt]), model_name="greet")
        (text,) = response.outputs[0].as_numpy().tolist()
        assert text in ("hello you", b"hello you"), text


@operation
def wrong_shapes_are_refused() -> None:
    wrong = request(True, 3)
    fails(lambda: asyncio.run(client().infer(URL, wrong, model_name="simple")), Exception, "shape [1, 3]")


if __name__ == "__main__":
    run_all()
