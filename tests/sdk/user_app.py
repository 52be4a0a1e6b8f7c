"""An app as its author writes it, for `test_user_types.py`: what a type checker must know of it, and what it must refuse.

`mypy --strict` also complains of an ignore that nothing needs, so each one here says that the line is found wrong.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import assert_type

import lamina

app = lamina.App("typed")


@app.function(slo="50ms")
def plain(x: int, y: str = "") -> float:
    return float(x)


@app.function(batch=4)
def batched(x: list[int]) -> list[float]:
    return [float(one) for one in x]


@app.function()
async def awaited(x: int) -> float:
    return float(x)


@app.function()
def words(text: str) -> Iterator[str]:
    yield from text.split()


@app.function()
async def later_words(text: str) -> AsyncIterator[str]:
    yield text


class _Model:
    def load(self) -> None:
        self.weight = 2.0

    def __call__(self, x: int) -> float:
        return self.weight * x


model = app.function(name="model")(_Model)


@app.function(slo="50ms")
class Scaled:
    def load(self) -> None:
        self.weight = 2.0

    def __call__(self, x: int, y: str = "") -> float:
        return self.weight * x


@app.function(batch=8)
class Rows:
    def __call__(self, x: list[int]) -> list[float]:
        return [float(one) for one in x]


@app.function(gpu="1/4")
class Torch(lamina.TorchModel):
    def load(self) -> tuple[object, object]:
        raise NotImplementedError


@app.workflow(slo="1s")
def traced(x: int) -> float:
    return plain(x)


@app.workflow()
async def read(x: int) -> float:
    return await plain.aio(x)


def uses() -> None:
    assert_type(plain(1), float)
    assert_type(plain.local(1, y="a"), float)
    assert_type(plain.remote(1), float)
    assert_type(awaited.remote(1), float)
    assert_type(words.remote("a"), list[str])
    assert_type(later_words.remote("a"), list[str])
    assert_type(words.stream("a"), Iterator[str])
    assert_type(later_words.stream("a"), Iterator[str])
    assert_type(model.remote(1), float)
    assert_type(traced.remote(1), float)
    assert_type(read.remote(1), float)
    batched.remote(1)
    plain.remote("x")  # type: ignore[arg-type]
    plain.local(z=1)  # type: ignore[call-arg]
    plain.spawn("x")  # type: ignore[arg-type]
    model.remote("x")  # type: ignore[arg-type]
    assert_type(Scaled(1), float)
    assert_type(Scaled.local(1, y="a"), float)
    assert_type(Scaled.remote(1), float)
    lamina.each(Scaled, [1, 2])
    Rows.remote(1)
    Torch.remote([1.0])
    Scaled("x")  # type: ignore[arg-type]
    Scaled.spawn(z=1)  # type: ignore[call-arg]
    Scaled.nothing()  # type: ignore[attr-defined]
    app.function(slow="1s")  # type: ignore[call-overload]
