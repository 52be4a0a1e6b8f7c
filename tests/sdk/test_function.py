from __future__ import annotations

import traceback

import pytest

import lamina
from lamina.errors import BadValue, LoadFailed


@pytest.fixture
def app() -> lamina.App:
    return lamina.App("math")


def test_a_decorated_function_is_an_ordinary_callable(app: lamina.App):
    @app.function()
    def square(x: float) -> float:
        """Multiplies by itself."""
        return x * x

    assert (square(3), square.__name__, square.__doc__) == (9, "square", "Multiplies by itself.")


def test_a_batched_plain_function_keeps_its_lists_in_plain_python(app: lamina.App):
    @app.function(batch=4)
    def double(x):
        return [2 * one for one in x]

    assert double([1, 2]) == [2, 4]


def test_local_wraps_one_request_into_a_batch(app: lamina.App):
    @app.function(batch=4)
    def add(x, y=10):
        return [a + b for a, b in zip(x, y, strict=True)]

    assert add.local(1) == 11


def test_a_decorated_class_handles_one_request_in_process(app: lamina.App):
    @app.function(batch=4)
    class Scaler:
        def load(self):
            self.factor = 3

        def __call__(self, x):
            return [self.factor * one for one in x]

    assert (Scaler.local(x=2), Scaler(2)) == (6, 6)


def test_local_loads_once(app: lamina.App):
    loads = []

    @app.function()
    class Model:
        def load(self):
            loads.append(1)

        def __call__(self, x):
            return x

    Model.local(1), Model.local(2)
    assert len(loads) == 1


def test_closing_the_app_closes_what_local_opened(app: lamina.App):
    closed = []

    @app.function()
    class Model:
        def __call__(self, x):
            return x

        def close(self):
            closed.append(1)

    Model.local(1)
    app.close()
    assert closed == [1]


def test_local_raises_the_users_own_error(app: lamina.App):
    @app.function()
    def fail(x):
        raise KeyError(x)

    with pytest.raises(KeyError, match="7"):
        fail.local(7)


def test_the_error_of_local_shows_no_runner_frames(app: lamina.App):
    @app.function()
    def fail(x):
        raise KeyError(x)

    with pytest.raises(KeyError) as caught:
        fail.local(7)
    assert "runner.py" not in "".join(traceback.format_exception(caught.value))


def test_a_load_that_fails_is_chained_to_the_users_error(app: lamina.App):
    @app.function()
    class Model:
        def load(self):
            raise OSError("no weights here")

        def __call__(self, x): ...

    with pytest.raises(LoadFailed, match="'model' cannot be loaded: OSError: no weights here") as caught:
        Model.local(1)
    assert isinstance(caught.value.__cause__, OSError)


def test_a_wrong_argument_of_local_is_named(app: lamina.App):
    @app.function()
    def square(x): ...

    with pytest.raises(BadValue, match="unknown parameter 'z'"):
        square.local(z=1)


def test_local_code_sees_the_cores_it_asked_for(app: lamina.App):
    @app.function(cpu=3)
    def units():
        return lamina.context().units

    assert units.local() == 3
