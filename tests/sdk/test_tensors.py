"""Tensor annotations, and conversion of values to them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import numpy as np
import pytest

import lamina
from lamina.errors import BadValue
from lamina.sdk.tensors import Port, Tensor, to_tensor

if TYPE_CHECKING:
    from nowhere import Invisible  # type: ignore[import-not-found]

Image = Annotated[np.ndarray, Tensor("FP32", [3, 8, 8])]
Scores = Annotated[np.ndarray, Tensor("FP32", [10])]


class Found(TypedDict):
    boxes: Annotated[np.ndarray, Tensor("FP32", [-1, 4])]
    label: str


def signature(target: Any, **options: Any) -> Any:
    return lamina.App("tensors").function(**options)(target).signature


def plain(image: Image, top: int = 5) -> Scores: ...


def batched(image: list[Image]) -> list[Scores]: ...


def several(image: Image) -> Found: ...


def yields(image: Image) -> Iterator[Scores]:
    yield image


def optional(image: Image | None = None) -> Any: ...


def untyped(x, y): ...


def unseen(x: Image, y: Invisible) -> Scores: ...


class Model:
    def __call__(self, image: Image) -> Scores: ...


IMAGE, SCORES = Tensor("FP32", [3, 8, 8]), Tensor("FP32", [10])


def test_annotated_parameters_are_tensors_and_others_json() -> None:
    found = signature(plain)
    assert found.inputs == (Port("image", IMAGE), Port("top", None, required=False, plain="number"))
    assert found.outputs == (Port("output", SCORES),)


@pytest.mark.parametrize(("target", "batch"), [(batched, 8), (Model, 1), (yields, 1)])
def test_lists_iterators_and_classes_say_it_of_one_request(target: Any, batch: int) -> None:
    found = signature(target, batch=batch)
    assert (found.inputs[0].tensor, found.outputs[0].tensor) == (IMAGE, SCORES)


def test_fields_of_a_typed_dict_are_outputs() -> None:
    assert signature(several).outputs == (Port("boxes", Tensor("FP32", [-1, 4])), Port("label", plain="text"))


def test_a_tensor_may_be_left_out() -> None:
    assert signature(optional).inputs == (Port("image", IMAGE, required=False),)


@pytest.mark.parametrize("target", [untyped, unseen])
def test_what_is_not_annotated_or_cannot_be_read_is_json(target: Any) -> None:
    assert all(port.tensor is None for port in signature(target).inputs)


def test_a_workflow_says_it_too() -> None:
    app = lamina.App("flow")

    @app.function()
    def step(x):
        return x

    @app.workflow()
    def flow(image: Image) -> Scores:
        return step(image)

    assert (flow.signature.inputs[0].tensor, flow.signature.outputs[0].tensor) == (IMAGE, SCORES)


@pytest.mark.parametrize(("dtype", "shape"), [("float32", [1]), ("FP32", [-2]), ("FP32", [1.5]), ("FP32", [1] * 40)])
def test_a_tensor_that_cannot_be_is_refused(dtype: str, shape: list[Any]) -> None:
    with pytest.raises(BadValue, match="Tensor"):
        Tensor(dtype, shape)


# -------------------------------------------------------------------------- fit


@pytest.mark.parametrize(
    ("tensor", "value", "wanted"),
    [
        (Tensor("FP32", [2]), [1, 2.5], np.array([1, 2.5], np.float32)),
        (Tensor("UINT8", [2]), [0, 255], np.array([0, 255], np.uint8)),
        (Tensor("BOOL", []), True, np.array(True)),
        (Tensor("INT64", [-1, 2]), [[1, 2]], np.array([[1, 2]])),
        (Tensor("BF16", [1]), [0.5], np.array([0.5], np.float32)),
        (Tensor("FP16", [0]), [], np.array([], np.float16)),
    ],
)
def test_lists_become_the_array_that_was_asked_for(tensor: Tensor, value: Any, wanted: np.ndarray) -> None:
    found = to_tensor("x", tensor, value)
    assert found.dtype == wanted.dtype and found.tolist() == wanted.tolist()


def test_an_array_that_fits_is_not_copied() -> None:
    array = np.zeros(4, np.float32)
    assert to_tensor("x", Tensor("FP32", [4]), array) is array


def test_text_becomes_bytes_as_deep_as_the_shape() -> None:
    assert to_tensor("x", Tensor("BYTES", [-1, 1]), [["a"], [b"b"]]) == [[b"a"], [b"b"]]
    assert to_tensor("x", Tensor("BYTES", []), "a") == b"a"


UNFIT = [("FP32", [2], [1]), ("FP32", [2], "ab"), ("UINT8", [1], [256]), ("UINT8", [1], [-1]), ("INT32", [1], [1.5])]
UNFIT += [("BOOL", [1], [1]), ("FP32", [1], None), ("FP32", [2, 2], [[1], [1, 2]]), ("BYTES", [1], [7]), ("BYTES", [2], ["a"])]
UNFIT += [("INT64", [1], [2**64]), ("FP32", [1], {"a": 1}), ("BYTES", [], ["a"])]


@pytest.mark.parametrize(("dtype", "shape", "value"), UNFIT)
def test_what_does_not_fit_is_refused(dtype: str, shape: list[int], value: Any) -> None:
    with pytest.raises(BadValue, match=r"^x: "):
        to_tensor("x", Tensor(dtype, shape), value)


def test_what_does_not_fit_is_named_in_words_and_not_in_numpys() -> None:
    with pytest.raises(BadValue) as refused:
        to_tensor("x", Tensor("FP32", [2]), ["a", "b"])
    assert refused.value.message == "x: text or objects where FP32 is needed"
    assert refused.value.hint == "send nested lists of numbers, or an array, of shape [2]"
