"""Symbols: placeholders of values that do not exist yet, while a workflow is traced.

They can be passed on, put into lists and dicts, indexed and compared. Whatever would need the value itself (an `if`, a
loop, arithmetic) says so and names the way to do it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any, Generic, TypeVar

from lamina.errors import BadFlow
from lamina.expr import Expr
from lamina.sdk.annotation_conversion import field_hint, has_field, wire_name
from lamina.sdk.user_errors import user_place
from lamina.units import parse_us

C = TypeVar("C")

_LEAVES = ("input", "node", "item", "inside")


class UnawaitedCall:
    """Call in an `async def` workflow that is not awaited yet. It is made, or recorded, where it is awaited."""

    __slots__ = ("make", "what")

    def __init__(self, what: str, make: Callable[[], Any]) -> None:
        self.what = what
        self.make = make

    def __repr__(self) -> str:
        return f"<{self.what}, not awaited>"

    def __await__(self) -> Generator[None, None, Any]:
        yield from ()
        return self.make()


class Comparisons(Generic[C]):
    """Comparison operators that make something of type C instead of a truth."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def _compare(self, sign: str, other: Any) -> C:
        raise NotImplementedError

    def __lt__(self, other: Any) -> C:
        return self._compare("<", other)

    def __le__(self, other: Any) -> C:
        return self._compare("<=", other)

    def __gt__(self, other: Any) -> C:
        return self._compare(">", other)

    def __ge__(self, other: Any) -> C:
        return self._compare(">=", other)

    def __eq__(self, other: Any) -> C:  # type: ignore[override]
        return self._compare("==", other)

    def __ne__(self, other: Any) -> C:  # type: ignore[override]
        return self._compare("!=", other)


class Symbol(Comparisons["Symbol"]):
    """Placeholder of a value. `form` is an expression in the making: steps and regions in it are objects that get their names
    at the end."""

    __slots__ = ("form", "hint")

    def __init__(self, form: Expr, hint: Any = None) -> None:
        self.form = form
        self.hint = hint  #: how the value is annotated, if it is: fields of a dataclass can be asked for

    def __repr__(self) -> str:
        return "<a value the workflow will have when it runs>"

    def __str__(self) -> str:
        raise _cannot("make text of", "make it in a function, which is a step")

    def __format__(self, spec: str) -> str:
        return str(self)

    def __getitem__(self, key: Any) -> Symbol:
        if isinstance(key, bool) or not isinstance(key, str | int):
            raise BadFlow(f"{user_place()}: cannot index with {key!r} in a workflow", hint="use a string or a whole number")
        if self.form[0] not in _LEAVES:
            raise BadFlow(f"{user_place()}: a condition has nothing to index", hint="index the result of a step")
        return Symbol([*self.form, key], field_hint(self.hint, key) if self.hint is not None else None)

    def __and__(self, other: Any) -> Symbol:
        return self._compare("and", other)

    def __or__(self, other: Any) -> Symbol:
        return self._compare("or", other)

    def __rand__(self, other: Any) -> Symbol:
        return Symbol(["and", form_of(other), self.form])

    def __ror__(self, other: Any) -> Symbol:
        return Symbol(["or", form_of(other), self.form])

    def __invert__(self) -> Symbol:
        return Symbol(["not", self.form])

    def _compare(self, sign: str, other: Any) -> Symbol:
        return Symbol([sign, self.form, form_of(other)])

    def __bool__(self) -> bool:
        raise _cannot("decide on", "use when(condition, then, otherwise), with & | ~; or async def, where if can be recorded")

    def __iter__(self) -> Any:
        raise _cannot("loop over", "use each(function, items)")

    def __len__(self) -> int:
        raise _cannot("count", "do it in a function, which is a step")

    def __contains__(self, item: Any) -> bool:
        raise _cannot("look into", "do it in a function, which is a step")

    def __getattr__(self, name: str) -> Any:
        if self.hint is not None and has_field(self.hint, name):
            return Symbol([*self.form, wire_name(self.hint, name)], field_hint(self.hint, name))
        raise AttributeError(
            f"{user_place()}: .{name} of a value that a workflow does not have yet; do it in a function, which is a step"
        )


def _cannot(verb: str, hint: str) -> BadFlow:
    return BadFlow(f"{user_place()}: cannot {verb} a value that a workflow does not have yet", hint=hint)


def _refuse_arithmetic() -> None:
    def refuse(self: Symbol, *others: Any) -> Any:
        raise _cannot("calculate with", "do it in a function, which is a step")

    binary = ["add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow", "lshift", "rshift", "xor"]
    names = [f"__{side}{name}__" for name in binary for side in ("", "r")]
    for name in [*names, "__neg__", "__pos__", "__abs__", "__int__", "__float__", "__index__", "__round__"]:
        setattr(Symbol, name, refuse)


_refuse_arithmetic()


def form_of(value: Any) -> Expr:
    """The form of an argument or result: symbols, constants, and lists and dicts of both."""
    if isinstance(value, Symbol):
        return value.form
    if isinstance(value, list | tuple):
        return _collection_form([form_of(inner) for inner in value], lambda forms: ["list", *forms], lambda plain: plain)
    if isinstance(value, Mapping):
        keys = list(value)
        if wrong := [key for key in keys if not isinstance(key, str)]:
            raise BadFlow(f"{user_place()}: key {wrong[0]!r} of a dict is not a string", hint="values travel as JSON types")
        return _collection_form(
            [form_of(inner) for inner in value.values()],
            lambda forms: ["dict", dict(zip(keys, forms, strict=True))],
            lambda plain: dict(zip(keys, plain, strict=True)),
        )
    if type(value).__module__.partition(".")[0] == "numpy" and getattr(value, "shape", None) == ():
        value = value.item()
    if isinstance(value, UnawaitedCall):
        raise BadFlow(f"{user_place()}: {value.what} is used before it is there", hint=f"write await {value.what}")
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return ["value", value]
    raise BadFlow(
        f"{user_place()}: a {type(value).__qualname__} cannot be a constant of a workflow",
        hint="use JSON types or bytes here; make anything else in a function, or take it as a parameter",
    )


def _collection_form(forms: list[Expr], symbolic: Callable[[list[Expr]], Expr], plain: Callable[[list[Any]], Any]) -> Expr:
    """Form of a collection. Constants stay one constant: only what holds a symbol needs a form of its own."""
    if all(form[0] == "value" for form in forms):
        return ["value", plain([form[1] for form in forms])]
    return symbolic(forms)


def duration_us(duration: Any, field: str) -> int:
    """A duration as "5s", or seconds; it must be known when the workflow is recorded."""
    if isinstance(duration, Symbol):
        raise BadFlow(f"{user_place()}: {field} of a value that a workflow does not have yet", hint="write it as states")
    return parse_us(duration, field) if isinstance(duration, str) else round(duration * 1_000_000)
