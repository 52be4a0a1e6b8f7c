"""The protocol over REST, against a real server: what fits is answered, and nothing that does not is a 5xx."""

from __future__ import annotations

import asyncio
import gzip
import json
import struct
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lamina.gateway.bootstrap import Gateway
from tests.gateway.oip.apps import APP
from tests.serving import Answer, Browser, run, served, shared, write_app

pytestmark = pytest.mark.live

Script = Callable[[Browser, Gateway], Awaitable[Any]]


def serve(folder: Path, script: Script, app: str = APP) -> Any:
    async def main() -> Any:
        async with served(write_app(folder, app)) as gateway, Browser(gateway.port) as browser:
            return await script(browser, gateway)

    return run(main)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A server shared by tests that leave it as it was."""
    with shared(write_app(tmp_path_factory.mktemp("tensors"), APP)) as one:
        yield one


def asked(gateway: Gateway, script: Script) -> Any:
    """Of a server that is there already, from a loop of its own."""

    async def main() -> Any:
        async with Browser(gateway.port) as browser:
            return await script(browser, gateway)

    return run(main)


def tensor(name: str, dtype: str, shape: list[int], data: Any) -> dict[str, Any]:
    return {"name": name, "datatype": dtype, "shape": shape, "data": data}


ROW = tensor("x", "FP32", [1, 4], [1, 2, 3, 4])
HOSTILE: dict[str, Any] = {
    "no inputs": {},
    "a list": [],
    "a number": 7,
    "inputs of another kind": {"inputs": 7},
    "an unknown input": {"inputs": [tensor("y", "FP32", [1, 4], [1, 2, 3, 4])]},
    "an unknown dtype": {"inputs": [tensor("x", "FP8", [1, 4], [1, 2, 3, 4])]},
    "another dtype": {"inputs": [tensor("x", "INT32", [1, 4], [1, 2, 3, 4])]},
    "too few": {"inputs": [tensor("x", "FP32", [1, 4], [1, 2, 3])]},
    "too many": {"inputs": [tensor("x", "FP32", [1, 4], [1, 2, 3, 4, 5])]},
    "text": {"inputs": [tensor("x", "FP32", [1, 4], ["1", "2", "3", "4"])]},
    "null": {"inputs": [tensor("x", "FP32", [1, 4], None)]},
    "no data": {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4]}]},
    "a negative length": {"inputs": [tensor("x", "FP32", [-1, 4], [])]},
    "a length of another kind": {"inputs": [tensor("x", "FP32", ["1", 4], [1, 2, 3, 4])]},
    "a product over 2^63": {"inputs": [tensor("x", "FP32", [2**62, 4], [1, 2, 3, 4])]},
    "a length over 2^64": {"inputs": [tensor("x", "FP32", [2**70, 4], [1, 2, 3, 4])]},
    "a batch of 1e9": {"inputs": [tensor("x", "FP32", [10**9, 4], [1, 2, 3, 4])]},
    "no rows": {"inputs": [tensor("x", "FP32", [0, 4], [])]},
    "rank 0": {"inputs": [tensor("x", "FP32", [], [1])]},
    "rank 33": {"inputs": [tensor("x", "FP32", [1] * 33, [1])]},
    "twice": {"inputs": [ROW, ROW]},
    "an unknown output": {"inputs": [ROW], "outputs": [{"name": "z"}]},
    "one output a thousand times": {"inputs": [ROW], "outputs": [{"name": "output"}] * 1000},
    "bytes that are not there": {"inputs": [{**ROW, "parameters": {"binary_data_size": 16}}]},
    "a size of another kind": {"inputs": [{**ROW, "parameters": {"binary_data_size": "16"}}]},
    "a timeout of another kind": {"inputs": [ROW], "parameters": {"timeout": "soon"}},
    "a negative priority": {"inputs": [ROW], "parameters": {"priority": -1}},
    "parameters of another kind": {"inputs": [ROW], "parameters": 7},
}


def test_nothing_wrong_with_a_request_is_the_servers_fault_and_no_worker_hears_of_it(gateway: Gateway) -> None:
    async def script(browser: Browser, gateway: Gateway) -> dict[str, Answer]:
        return {name: await browser.post("/v2/models/double/infer", body) for name, body in HOSTILE.items()}

    for name, answer in asked(gateway, script).items():
        assert answer.status == 400, (name, answer.body)
        assert list(answer.json) == ["error"] and answer.json["error"], name


def inferred(gateway: Gateway, model: str, *inputs: dict[str, Any]) -> Answer:
    async def script(browser: Browser, gateway: Gateway) -> Answer:
        return await browser.post(f"/v2/models/{model}/infer", {"inputs": list(inputs)})

    answer: Answer = asked(gateway, script)
    return answer


def test_bytes_are_the_element_itself(gateway: Gateway) -> None:
    (output,) = inferred(gateway, "reverse", tensor("data", "BYTES", [1], ["abc"])).json["outputs"]
    assert (output["datatype"], output["data"]) == ("BYTES", ["cba"])


def test_bytes_of_generate_are_base64(gateway: Gateway) -> None:
    async def script(browser: Browser, gateway: Gateway) -> Any:
        return [await browser.post("/v2/models/reverse/generate", {"data": value}) for value in ("YWJj", "?", 3)]

    right, *wrong = asked(gateway, script)
    assert right.json["output"] == "cba"
    assert [answer.json["error"] for answer in wrong] == [
        "data: '?' is not base64 (send bytes as base64)",
        "data: int where text is needed (send a string)",
    ]


@pytest.mark.parametrize(
    ("inputs", "found"),
    [
        ([tensor("x", "FP32", [2, 1], [1, 2])], ["ndarray", "float32", [2, 1], "int", 1]),
        ([tensor("x", "UINT8", [], [1])], ["ndarray", "uint8", [], "int", 1]),
        ([tensor("x", "BYTES", [1], ['{"a": 1}']), tensor("n", "INT64", [1], [7])], ["dict", "", [], "int", 7]),
    ],
)
def test_inputs_without_a_tensor_in_their_annotation_take_numbers_too(gateway: Gateway, inputs: Any, found: Any) -> None:
    (output,) = inferred(gateway, "kinds", *inputs).json["outputs"]
    assert json.loads(output["data"][0]) == found


@pytest.mark.parametrize(
    ("model", "given", "said"),
    [
        ("kinds", tensor("n", "INT64", [2], [7, 8]), "n: 2 numbers where one is needed (send a tensor of shape [1])"),
        ("kinds", tensor("x", "FP8", [1], [1]), "x: datatype 'FP8'"),
        (
            "greet",
            tensor("prompt", "INT8", [1], [1]),
            "prompt: datatype 'INT8' where BYTES is needed (one element, the text in UTF-8)",
        ),
        ("reverse", tensor("data", "UINT8", [2], [1, 2]), "data: datatype 'UINT8' where BYTES is needed (one element, the bytes"),
        ("greet_all", tensor("prompt", "BYTES", [], ["a"]), "prompt: shape [] where [-1, 1] is needed"),
    ],
)
def test_what_cannot_be_such_a_value_is_told_with_what_can(gateway: Gateway, model: str, given: Any, said: str) -> None:
    x = tensor("x", "FP32", [1], [1])
    answer = inferred(gateway, model, *([x] if given["name"] == "n" else []), given)
    assert answer.status == 400 and said in answer.json["error"]


@pytest.mark.parametrize("verb", ["infer", "generate"])
def test_wishes_that_are_headers_elsewhere_are_refused_with_what_to_say_instead(gateway: Gateway, verb: str) -> None:
    async def script(browser: Browser, gateway: Gateway) -> Answer:
        return await browser.ask("POST", f"/v2/models/double/{verb}", b"{}", "application/json", **{"Lamina-Deadline-Ms": "50"})

    answer = asked(gateway, script)
    assert answer.status == 400
    assert "'lamina-deadline-ms' is no header of /v2" in answer.json["error"] and "'timeout'" in answer.json["error"]


BINARY = (
    json.dumps({"inputs": [{**ROW, "parameters": {"binary_data_size": 16}, "data": None}]}).replace(', "data": null', "").encode()
)
RAW = struct.pack("<4f", 1, 2, 3, 4)
LENGTHS = {"": 400, "0": 400, "-1": 400, "x": 400, "9" * 30: 400, str(len(BINARY) + 1): 400, str(len(BINARY)): 200}


def test_the_length_of_the_header_is_believed_only_if_it_fits(gateway: Gateway) -> None:
    async def script(browser: Browser, gateway: Gateway) -> dict[str, int]:
        found = {}
        for length in LENGTHS:
            headers = {"Inference_Header_Content_Length": length}
            answer = await browser.ask("POST", "/v2/models/double/infer", BINARY + RAW, "application/json", **headers)
            found[length] = answer.status
        return found

    assert asked(gateway, script) == LENGTHS


def test_requests_that_wait_together_run_as_one_batch(gateway: Gateway) -> None:
    async def script(browser: Browser, gateway: Gateway) -> int:
        await browser.post("/v2/models/double/infer", {"inputs": [ROW]})
        others = [Browser(gateway.port) for _ in range(8)]
        asking = []
        for other in others:
            await other.__aenter__()
            asking.append(other.post("/v2/models/double/infer", {"inputs": [ROW]}))
        answers = await asyncio.gather(*asking)
        for other in others:
            await other.__aexit__()
        return max(int(answer.headers["lamina-batch"]) for answer in answers)

    assert asked(gateway, script) > 1


def test_the_rows_of_a_request_are_one_batch(tmp_path: Path) -> None:
    async def script(browser: Browser, gateway: Gateway) -> Any:
        await browser.post("/v2/models/double/infer", {"inputs": [ROW]})
        answer = await browser.post("/v2/models/double/infer", {"inputs": [tensor("x", "FP32", [3, 4], list(range(12)))]})
        assert answer.json["outputs"][0] == tensor("output", "FP32", [3, 4], [2.0 * n for n in range(12)])
        stats = (await browser.ask("GET", "/v2/models/double/stats")).json["model_stats"][0]
        return stats["inference_count"], sum(size["batch_size"] * size["compute_infer"]["count"] for size in stats["batch_stats"])

    assert serve(tmp_path, script) == (4, 4)


def test_a_gzip_bomb_is_refused_at_the_limit_of_a_body(gateway: Gateway) -> None:
    bomb = gzip.compress(bytes(40 * 2**20), 1)

    async def script(browser: Browser, gateway: Gateway) -> Answer:
        return await browser.ask("POST", "/v2/models/double/infer", bomb, Content_Encoding="gzip")

    answer = asked(gateway, script)
    assert answer.status == 413 and "error" in answer.json


def test_a_function_that_breaks_its_promise_is_to_blame(gateway: Gateway) -> None:
    async def script(browser: Browser, gateway: Gateway) -> Answer:
        return await browser.post("/v2/models/liar/infer", {"inputs": [tensor("x", "FP32", [1], [1])]})

    answer = asked(gateway, script)
    assert answer.status == 500 and "promises" in answer.json["error"]


def test_a_typed_function_gets_arrays_from_plain_json_too(gateway: Gateway) -> None:
    async def script(browser: Browser, gateway: Gateway) -> tuple[Any, int]:
        good = await browser.post("/v1/functions/double", [1, 2, 3, 4])
        bad = await browser.post("/v1/functions/double", [1, 2, 3])
        return good.json, bad.status

    assert asked(gateway, script) == ([2, 4, 6, 8], 422)


def test_an_unloaded_model_gives_up_its_instances_and_comes_back(tmp_path: Path) -> None:
    async def script(browser: Browser, gateway: Gateway) -> list[Any]:
        ask = {"inputs": [ROW]}
        await browser.post("/v2/models/double/infer", ask)
        instances = gateway.driver.controller.state.functions["double"].instances
        await browser.post("/v2/repository/models/double/unload", {})
        while instances:
            await asyncio.sleep(0.01)
        refused = await browser.post("/v2/models/double/infer", ask)
        index = (await browser.ask("POST", "/v2/repository/index", b'{"ready": true}')).json
        await browser.post("/v2/repository/models/double/load", {})
        again = await browser.post("/v2/models/double/infer", ask)
        return [refused.status, "double" in [one["name"] for one in index], again.status, len(instances)]

    assert serve(tmp_path, script) == [400, False, 200, 1]


def test_files_and_settings_are_not_taken_from_clients(gateway: Gateway) -> None:
    async def script(browser: Browser, gateway: Gateway) -> int:
        body = {"parameters": {"config": "{}", "file:1/model.onnx": "AAAA"}}
        return (await browser.post("/v2/repository/models/double/load", body)).status

    assert asked(gateway, script) == 400


def test_errors_of_addresses_and_methods_are_the_protocols(gateway: Gateway) -> None:
    async def script(browser: Browser, gateway: Gateway) -> list[tuple[int, list[str]]]:
        asked = [("GET", "/v2/nowhere"), ("GET", "/v2/models/none"), ("GET", "/v2/models/double/versions/7"), ("PUT", "/v2")]
        asked += [("GET", "/v2/models/double/infer"), ("POST", "/v2/models/double"), ("GET", "/v2/models/../double")]
        found = []
        for method, path in asked:
            answer = await browser.ask(method, path)
            found.append((answer.status, list(answer.json)))
        return found

    assert asked(gateway, script) == [(status, ["error"]) for status in (404, 404, 404, 405, 405, 405, 404)]
