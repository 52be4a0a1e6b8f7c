"""Expressions of `async def` workflows: see `ast_workflow`. Known values are computed at once, symbols become forms."""

from __future__ import annotations

import ast
import asyncio
import builtins
import inspect
import operator
import sys
from collections.abc import Callable, Iterable, Mapping
from types import CellType
from typing import Any

from lamina.errors import BadFlow
from lamina.sdk import workflow_ops
from lamina.sdk.annotation_conversion import has_field
from lamina.sdk.recorder import BlockOutcome, Recorder
from lamina.sdk.symbols import Symbol, UnawaitedCall, form_of
from lamina.sdk.user_errors import user_place
from lamina.sdk.workflow_tracing import EachLimits

Env = dict[str, Any]

_ASYNCIO_TWINS: dict[Any, Any] = {
    asyncio.gather: workflow_ops.gather,
    asyncio.sleep: workflow_ops.sleep,
    asyncio.timeout: workflow_ops.timeout,
}
"""Words of asyncio that mean the same here."""

_BINARY: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.Mod: operator.mod,
    ast.FloorDiv: operator.floordiv, ast.Pow: operator.pow, ast.BitAnd: operator.and_, ast.BitOr: operator.or_,
    ast.BitXor: operator.xor, ast.LShift: operator.lshift, ast.RShift: operator.rshift, ast.MatMult: operator.matmul,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Eq: operator.eq,
    ast.NotEq: operator.ne, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.In: lambda item, items: item in items, ast.NotIn: lambda item, items: item not in items,
}  # fmt: skip
_UNARY: dict[type[ast.AST], Callable[[Any], Any]] = {
    ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Invert: operator.invert,
}  # fmt: skip
_AWAITABLE = "await a function or workflow of the app, gather, each, sleep or callback"
_BOOLEAN_HEADS = {"<", "<=", ">", ">=", "==", "!=", "and", "or", "not"}


class CaughtError(Symbol):
    """Symbol of a caught error: `str(error)` is its text."""

    __slots__ = ()


class ItemCalls(UnawaitedCall):
    """Calls for the items of a list that a step makes; for gather."""

    __slots__ = ()


class Closure:
    """Function defined inside a workflow: it is read where it is called."""

    def __init__(self, reading: ExpressionReader, node: ast.Lambda | ast.FunctionDef | ast.AsyncFunctionDef, env: Env) -> None:
        self._reading, self._node, self._env = reading, node, env
        places = node.args
        if places.vararg or places.kwarg:
            raise BadFlow(f"{user_place()}: *args and **kwargs cannot be recorded", hint="name every parameter")
        self._names = [arg.arg for arg in (*places.posonlyargs, *places.args, *places.kwonlyargs)]
        named = [arg.arg for arg in (*places.posonlyargs, *places.args)]
        self._defaults = dict(zip(named[len(named) - len(places.defaults) :], places.defaults, strict=True))
        self._defaults |= {a.arg: d for a, d in zip(places.kwonlyargs, places.kw_defaults, strict=True) if d is not None}
        self._defaults = {name: reading.visit(default, env) for name, default in self._defaults.items()}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = {**self._defaults, **dict(zip(self._names, args, strict=False)), **kwargs}
        if len(args) > len(self._names) or given.keys() != set(self._names):
            raise TypeError(f"takes {', '.join(self._names) or 'nothing'}")
        node, env = self._node, {**self._env, **given}
        if isinstance(node, ast.Lambda):
            return self._reading.visit(node.body, env)

        def make() -> Any:
            return self._reading.reader_for(node).read_result(env)

        return UnawaitedCall(f"{node.name}(...)", make) if isinstance(node, ast.AsyncFunctionDef) else make()


class ExpressionReader:
    """Reader of one function's expressions; its statements are in the class that extends this one."""

    def __init__(
        self,
        recorder: Recorder,
        file: str,
        function: ast.FunctionDef | ast.AsyncFunctionDef,
        cells: Mapping[str, CellType],
        names: Mapping[str, Any],
    ) -> None:
        self.recorder = recorder
        self.file = file
        self.function = function
        self._cells = cells
        self._globals = names

    def visit(self, node: ast.expr | ast.stmt, env: Env, rest: list[ast.stmt] | None = None, tail: bool = False) -> Any:
        raise NotImplementedError

    def read_block(self, statements: list[ast.stmt], env: Env, tail: bool) -> BlockOutcome:
        raise NotImplementedError

    def reader_for(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> ExpressionReader:
        """A reader of a function inside this one."""
        return type(self)(self.recorder, self.file, function, self._cells, self._globals)

    def read_result(self, env: Env) -> Any:
        return self.read_block(self.function.body, dict(env), tail=True).value

    def closure(self, node: ast.Lambda | ast.FunctionDef | ast.AsyncFunctionDef, env: Env) -> Closure:
        return Closure(self, node, env)

    def assign(self, target: ast.expr, value: Any, env: Env) -> None:
        if isinstance(target, ast.Name):
            env[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List) and not any(isinstance(part, ast.Starred) for part in target.elts):
            count = len(target.elts)
            parts = [value[index] for index in range(count)] if isinstance(value, Symbol) else list(value)
            for part, one in zip(target.elts, parts, strict=True):
                self.assign(part, one, env)
        else:
            raise BadFlow(f"{user_place()}: only names can be set in a workflow", hint="put the value together in one expression")

    # ------------------------------------------------------------------------ values

    def _Constant(self, node: ast.Constant, env: Env) -> Any:
        return node.value

    def _Name(self, node: ast.Name, env: Env) -> Any:
        if node.id in env:
            return env[node.id]
        if node.id in self._cells:
            return self._cells[node.id].cell_contents
        if node.id in self._globals:
            return self._globals[node.id]
        if hasattr(builtins, node.id):
            return getattr(builtins, node.id)
        raise BadFlow(f"{user_place()}: {node.id!r} is not set on every way here", hint="set it before the loop, if or try")

    def _List(self, node: ast.List, env: Env) -> list[Any]:
        return self._read_all(node.elts, env)

    def _Tuple(self, node: ast.Tuple, env: Env) -> tuple[Any, ...]:
        return tuple(self._read_all(node.elts, env))

    def _Dict(self, node: ast.Dict, env: Env) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            read = self.visit(value, env)
            found |= read if key is None else {self.visit(key, env): read}
        return found

    def _Attribute(self, node: ast.Attribute, env: Env) -> Any:
        value = self.visit(node.value, env)
        if isinstance(value, CaughtError):
            raise BadFlow(f"{user_place()}: .{node.attr} of an error", hint="str(error) is what it said")
        if isinstance(value, Symbol) and not has_field(value.hint, node.attr):
            raise BadFlow(
                f"{user_place()}: .{node.attr} of a value that a workflow does not have yet",
                hint="do it in a function, which is a step",
            )
        return getattr(value, node.attr)

    def _Subscript(self, node: ast.Subscript, env: Env) -> Any:
        return self.visit(node.value, env)[self.visit(node.slice, env)]

    def _Slice(self, node: ast.Slice, env: Env) -> slice:
        return slice(*(part and self.visit(part, env) for part in (node.lower, node.upper, node.step)))

    def _JoinedStr(self, node: ast.JoinedStr, env: Env) -> str:
        return "".join(str(part) for part in self._read_all(node.values, env))

    def _FormattedValue(self, node: ast.FormattedValue, env: Env) -> str:
        value = self.visit(node.value, env)
        if isinstance(value, Symbol):
            raise BadFlow(f"{user_place()}: an f-string needs the value itself", hint="make the text in a function")
        shown: dict[str, Callable[[Any], str]] = {"r": repr, "s": str, "a": ascii}
        value = shown[chr(node.conversion)](value) if node.conversion != -1 else value
        return format(value, self.visit(node.format_spec, env) if node.format_spec else "")

    def _Lambda(self, node: ast.Lambda, env: Env) -> Closure:
        return self.closure(node, env)

    def _NamedExpr(self, node: ast.NamedExpr, env: Env) -> Any:
        env[node.target.id] = self.visit(node.value, env)
        return env[node.target.id]

    # ------------------------------------------------------------------------- truth

    def _Compare(self, node: ast.Compare, env: Env) -> Any:
        values = self._read_all([node.left, *node.comparators], env)
        parts = [_compare(op, left, right) for op, left, right in zip(node.ops, values, values[1:], strict=False)]
        if any(isinstance(part, Symbol) for part in parts) and len(parts) > 1:
            return Symbol(["and", *(form_of(part) for part in parts)])
        return parts[0] if len(parts) == 1 else all(parts)

    def _BoolOp(self, node: ast.BoolOp, env: Env) -> Any:
        """`and`, `or`: as in Python, `a or b` is one of the two, unless both are truths anyway."""
        is_and = isinstance(node.op, ast.And)
        value = self.visit(node.values[0], env)
        for later in node.values[1:]:
            if not isinstance(value, Symbol):
                if bool(value) is not is_and:
                    return value
                value = self.visit(later, env)
                continue
            other = form_of(self.visit(later, env))
            if value.form[0] in _BOOLEAN_HEADS and other[0] in _BOOLEAN_HEADS:
                value = Symbol(["and" if is_and else "or", value.form, other])
            else:
                value = Symbol(["first", ["when", ["not", value.form] if is_and else value.form, value.form], other])
        return value

    def _UnaryOp(self, node: ast.UnaryOp, env: Env) -> Any:
        value = self.visit(node.operand, env)
        if isinstance(node.op, ast.Not):
            return Symbol(["not", value.form]) if isinstance(value, Symbol) else not value
        return _UNARY[type(node.op)](value)

    def _BinOp(self, node: ast.BinOp, env: Env) -> Any:
        return _BINARY[type(node.op)](self.visit(node.left, env), self.visit(node.right, env))

    def _IfExp(self, node: ast.IfExp, env: Env) -> Any:
        test = self.visit(node.test, env)
        if not isinstance(test, Symbol):
            return self.visit(node.body if test else node.orelse, env)
        bodies = [lambda branch=branch: BlockOutcome("return", self.visit(branch, env)) for branch in (node.body, node.orelse)]
        return self.recorder.choose(test, (bodies[0], bodies[1]), ()).value

    # ------------------------------------------------------------------------- calls

    def _Await(self, node: ast.Await, env: Env) -> Any:
        value = self.visit(node.value, env)
        if isinstance(value, ItemCalls) or not isinstance(value, UnawaitedCall):
            raise BadFlow(f"{user_place()}: only steps can be awaited", hint=_AWAITABLE)
        return value.make()

    def _Call(self, node: ast.Call, env: Env) -> Any:
        function = self.visit(node.func, env)
        args = self._read_all(node.args, env)
        named: dict[str, Any] = {}
        for word in node.keywords:
            value = self.visit(word.value, env)
            named |= value if word.arg is None else {word.arg: value}
        if function is str and len(args) == 1 and isinstance(args[0], CaughtError):
            return Symbol([*args[0].form, "Cause"])
        if inspect.isfunction(function) and function in _ASYNCIO_TWINS:
            function = _ASYNCIO_TWINS[function]
        elif inspect.iscoroutinefunction(function) and function.__module__.partition(".")[0] not in sys.stdlib_module_names:
            from lamina.sdk.ast_workflow import read_workflow

            bound = inspect.signature(function).bind(*args, **named)
            bound.apply_defaults()
            return UnawaitedCall(f"{function.__name__}(...)", lambda: read_workflow(function, self.recorder, bound.arguments))
        if inspect.iscoroutinefunction(function):
            raise BadFlow(f"{user_place()}: {function.__module__}.{function.__name__} cannot be recorded", hint=_AWAITABLE)
        return function(*args, **named)

    def _ListComp(self, node: ast.ListComp | ast.GeneratorExp, env: Env) -> Any:
        """A comprehension. Over known items as in Python; over a step's list with await one by one, else all for a gather."""
        (loop, *more), element = node.generators, node.elt
        items = self.visit(loop.iter, env)
        if not isinstance(items, Symbol):
            return [value for inside in self._iterations(node.generators, env) for value in [self.visit(element, inside)]]
        if more or loop.ifs:
            raise BadFlow(f"{user_place()}: only `for x in items` can be recorded", hint="filter in a function; nest with each")

        def turn(item: Symbol) -> Any:
            inside = dict(env)
            self.assign(loop.target, item, inside)
            return self.visit(element, inside)

        if any(isinstance(inner, ast.Await) for inner in ast.walk(element)):
            return self.recorder.each(turn, items, 4.0, EachLimits(max_concurrency=1)).make()
        return ItemCalls("gather(*...)", self.recorder.each(turn, items, 4.0).make)

    _GeneratorExp = _ListComp

    def _iterations(self, loops: list[ast.comprehension], env: Env) -> Iterable[Env]:
        if not loops:
            yield env
            return
        for item in self.visit(loops[0].iter, env):
            inside = dict(env)
            self.assign(loops[0].target, item, inside)
            if all(self.visit(test, inside) for test in loops[0].ifs):
                yield from self._iterations(loops[1:], inside)

    def _read_all(self, nodes: Iterable[ast.expr], env: Env) -> list[Any]:
        found: list[Any] = []
        for node in nodes:
            if not isinstance(node, ast.Starred):
                found.append(self.visit(node, env))
                continue
            value = self.visit(node.value, env)
            found += [value] if isinstance(value, ItemCalls) else list(value)
        return found


def _compare(op: ast.cmpop, left: Any, right: Any) -> Any:
    """A comparison; `is None` is a question about the value, not about its symbol."""
    if isinstance(op, ast.Is | ast.IsNot) and (isinstance(left, Symbol) or isinstance(right, Symbol)):
        return _BINARY[ast.Eq if isinstance(op, ast.Is) else ast.NotEq](left, right)
    return _BINARY[type(op)](left, right)
