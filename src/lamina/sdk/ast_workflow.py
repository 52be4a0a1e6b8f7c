"""`async def` workflows, read from their AST: statement by statement they become steps and branches.

Whatever is known when the workflow is recorded (constants, calls of plain Python with them) happens at once; what a step
will give is a symbol. Nothing is compiled or evaluated implicitly: each kind of statement that can be recorded
has its method here, each kind of expression in `ast_expressions`, and all others are refused with their line and a way out.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from lamina.core.workflow.error_policy import ALL, ErrorPolicy
from lamina.errors import BadFlow, LaminaError
from lamina.sdk.ast_expressions import CaughtError, ExpressionReader
from lamina.sdk.recorder import BlockOutcome, Recorder
from lamina.sdk.symbols import Symbol, UnawaitedCall
from lamina.sdk.user_errors import SourceLine, message_of, source_line, user_frames_only, user_place
from lamina.sdk.workflow_ops import Timeout
from lamina.sdk.workflow_tracing import EachLimits

Env = dict[str, Any]

_INSTEAD = {
    ast.While: "loop inside of a function, or go back with the builder's choice()",
    ast.Match: "use if and elif",
    ast.Assert: "use if and raise",
    ast.Break: "decide in a function what to loop over",
    ast.Continue: "decide in a function what to loop over",
    ast.Yield: "return a list",
    ast.Import: "import at the top of the file",
    ast.ImportFrom: "import at the top of the file",
    ast.ClassDef: "define it outside",
    ast.Delete: "leave it",
    ast.Global: "keep state in app.state",
    ast.Nonlocal: "return the value instead",
    ast.SetComp: "use a list",
}


class WorkflowReader(ExpressionReader):
    """Reader of one function's statements. `file` is where it was written, for errors."""

    def visit(self, node: ast.expr | ast.stmt, env: Env, rest: list[ast.stmt] | None = None, tail: bool = False) -> Any:
        """Read one statement or expression, with its line as the place of errors. `rest` are the statements that follow it."""
        read = getattr(self, f"_{type(node).__name__}", None)
        token = source_line.set(SourceLine(self.file, node.lineno, sys._getframe()))
        try:
            if read is None:
                remedy = _INSTEAD.get(type(node), "do it in a function, which is a step")
                raise BadFlow(f"{user_place()}: a workflow cannot record {_name(node)}", hint=remedy)
            return read(node, env) if rest is None else read(node, env, rest, tail)
        except LaminaError:
            raise
        except Exception as error:
            raise BadFlow(
                f"{user_place()}: {message_of(error)}",
                hint="a workflow passes values on and compares them; whatever else it does belongs into functions",
            ) from user_frames_only(error)
        finally:
            source_line.reset(token)

    def read_block(self, statements: list[ast.stmt], env: Env, tail: bool) -> BlockOutcome:
        """Read statements in order. `tail`: their end is the end of the function, where None is returned."""
        for index, node in enumerate(statements):
            outcome: BlockOutcome | None = self.visit(node, env, statements[index + 1 :], tail)
            if outcome is not None:
                return outcome
        return BlockOutcome("return") if tail else BlockOutcome(env=env)

    # -------------------------------------------------------------------- in a row

    def _Expr(self, node: ast.Expr, env: Env, rest: list[ast.stmt], tail: bool) -> None:
        if isinstance(value := self.visit(node.value, env), UnawaitedCall):
            raise BadFlow(f"{user_place()}: {value.what} is never awaited", hint=f"write await {value.what}")

    def _Pass(self, node: ast.Pass, env: Env, rest: list[ast.stmt], tail: bool) -> None:
        pass

    def _Assign(self, node: ast.Assign, env: Env, rest: list[ast.stmt], tail: bool) -> None:
        value = self.visit(node.value, env)
        for target in node.targets:
            self.assign(target, value, env)

    def _AnnAssign(self, node: ast.AnnAssign, env: Env, rest: list[ast.stmt], tail: bool) -> None:
        if node.value is not None:
            self.assign(node.target, self.visit(node.value, env), env)

    def _AugAssign(self, node: ast.AugAssign, env: Env, rest: list[ast.stmt], tail: bool) -> None:
        both = ast.copy_location(ast.BinOp(_loaded(node.target), node.op, node.value), node)
        self.assign(node.target, self.visit(both, env), env)

    def _Return(self, node: ast.Return, env: Env, rest: list[ast.stmt], tail: bool) -> BlockOutcome:
        return BlockOutcome("return", None if node.value is None else self.visit(node.value, env), env)

    def _Raise(self, node: ast.Raise, env: Env, rest: list[ast.stmt], tail: bool) -> BlockOutcome:
        error = self.visit(node.exc, env) if node.exc is not None else None
        error = error() if isinstance(error, type) and issubclass(error, Exception) else error
        if not isinstance(error, Exception):
            raise BadFlow(f"{user_place()}: what is raised must be known now", hint='raise ValueError("what is wrong")')
        if any(isinstance(part, Symbol) for part in error.args):
            raise BadFlow(f"{user_place()}: an error cannot tell a value that is not there yet", hint="raise it in a function")
        self.recorder.fail(type(error).__name__, str(error))
        return BlockOutcome("raise")

    def _FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef, env: Env, rest: list[ast.stmt], tail: bool) -> None:
        env[node.name] = self.closure(node, env)

    _AsyncFunctionDef = _FunctionDef

    # ---------------------------------------------------------------- branches

    def _If(self, node: ast.If, env: Env, rest: list[ast.stmt], tail: bool) -> BlockOutcome | None:
        test = self.visit(node.test, env)
        returns = _has(node, ast.Return)
        following, tail = (rest, tail) if returns else ([], False)
        if not isinstance(test, Symbol):
            outcome = self.read_block([*(node.body if test else node.orelse), *following], env, tail)
        else:
            branches: list[list[ast.stmt]] = [[*node.body, *following], [*node.orelse, *following]]
            bodies = [lambda branch=branch: self.read_block(branch, dict(env), tail) for branch in branches]
            outcome = self.recorder.choose(test, (bodies[0], bodies[1]), self._read_elsewhere(node))
        return self._continue_with(outcome, env, returns)

    def _Try(self, node: ast.Try, env: Env, rest: list[ast.stmt], tail: bool) -> BlockOutcome | None:
        if node.finalbody:
            raise BadFlow(f"{user_place()}: finally cannot be recorded", hint="write it after the try, and in each except")
        returns = _has(node, ast.Return)
        following, tail = (rest, tail) if returns else ([], False)
        handlers: list[tuple[tuple[str, ...], Callable[[Symbol], BlockOutcome]]] = []
        for handler in node.handlers:

            def handle(message: Symbol, handler: ast.ExceptHandler = handler) -> BlockOutcome:
                inside = {**env, handler.name: CaughtError(message.form)} if handler.name else dict(env)
                return self.read_block([*handler.body, *following], inside, tail)

            handlers.append((self._error_names(handler, env), handle))

        def then(ended: BlockOutcome) -> BlockOutcome:
            return ended if ended.status == "return" else self.read_block([*node.orelse, *following], ended.env, tail)

        names = {*self._read_elsewhere(node), *(_stored(node) & set(_loads(*node.orelse)))}
        catches = [ast.unparse(handler.type) if handler.type is not None else "Exception" for handler in node.handlers]
        body = lambda: self.read_block(node.body, dict(env), False)  # noqa: E731
        outcome = self.recorder.block("try", ErrorPolicy(), body, names, handlers, then, catches)
        return self._continue_with(outcome, env, returns)

    def _AsyncWith(self, node: ast.AsyncWith | ast.With, env: Env, rest: list[ast.stmt], tail: bool) -> BlockOutcome | None:
        limit = self.visit(node.items[0].context_expr, env)
        if len(node.items) > 1 or not isinstance(limit, Timeout) or node.items[0].optional_vars is not None:
            raise BadFlow(f"{user_place()}: only a time limit can surround steps", hint='async with lamina.timeout("5s"):')
        returns = _has(node, ast.Return)
        following, tail = (rest, tail) if returns else ([], False)

        def then(ended: BlockOutcome) -> BlockOutcome:
            return ended if ended.status == "return" else self.read_block(following, ended.env, tail)

        policy = ErrorPolicy(timeout_us=limit.duration_us)
        body = lambda: self.read_block(node.body, dict(env), False)  # noqa: E731
        return self._continue_with(
            self.recorder.block("timeout", policy, body, self._read_elsewhere(node), [], then), env, returns
        )

    _With = _AsyncWith

    def _For(self, node: ast.For, env: Env, rest: list[ast.stmt], tail: bool) -> BlockOutcome | None:
        """A for loop. Over known items: unrolled here. Over a list a step makes: one item after the other, when it runs."""
        if _has(node, ast.Return):
            raise BadFlow(f"{user_place()}: a return inside of a loop cannot be recorded", hint="use each, and return its list")
        items = self.visit(node.iter, env)
        if not isinstance(items, Symbol):
            for item in items:
                self.assign(node.target, item, env)
                outcome = self.read_block(node.body, env, False)
                if outcome.status != "on":
                    return outcome
            return self.read_block(node.orelse, env, False) if node.orelse else None
        if carried := sorted(_stored(node) & env.keys() & set(_loads(*node.body))):
            raise BadFlow(
                f"{user_place()}: the loop changes {carried[0]!r} from turn to turn",
                hint="collect the results with each(...) and put them together in a function",
            )

        def turn(item: Symbol) -> None:
            inside = dict(env)
            self.assign(node.target, item, inside)
            self.read_block(node.body, inside, False)

        self.recorder.each(turn, items, 4.0, EachLimits(max_concurrency=1)).make()
        for name in _stored(node):
            env.pop(name, None)
        return None

    # ------------------------------------------------------------------------- parts

    def _continue_with(self, outcome: BlockOutcome, env: Env, taken: bool) -> BlockOutcome | None:
        """None: go on with the next statement. Where branches return, what follows has been read as part of them."""
        if taken or outcome.status != "on":
            return outcome
        found = dict(outcome.env)
        env.clear()
        env.update(found)
        return None

    def _error_names(self, handler: ast.ExceptHandler, env: Env) -> tuple[str, ...]:
        """Error names of an except: its classes and all that are known to derive from them."""
        kinds = self.visit(handler.type, env) if handler.type is not None else Exception
        found: list[str] = []
        for kind in kinds if isinstance(kinds, tuple) else (kinds,):
            if not (isinstance(kind, type) and issubclass(kind, BaseException)):
                raise BadFlow(f"{user_place()}: except needs classes of errors", hint="except (ValueError, TimeoutError):")
            if kind in (Exception, BaseException):
                return (ALL,)
            found += [one.__name__ for one in _subclasses(kind)]
            if issubclass(TimeoutError, kind):
                found.append("States.Timeout")
        return tuple(dict.fromkeys(found))

    def _read_elsewhere(self, node: ast.stmt) -> list[str]:
        """Variables set in this statement that are read elsewhere."""
        outside = Counter(_loads(self.function))
        outside.subtract(Counter(_loads(node)))
        return [name for name in sorted(_stored(node)) if outside[name] > 0]


def read_workflow(target: Callable[..., Any], recorder: Recorder, symbols: Env) -> Any:
    """Read an async def: its result, with everything it awaits recorded on the way."""
    return reader_of(target, recorder).read_result(symbols)


def reader_of(target: Callable[..., Any], recorder: Recorder) -> WorkflowReader:
    try:
        lines, first = inspect.getsourcelines(target)
    except (OSError, TypeError):
        raise BadFlow(
            f"{user_place()}: the source of {target.__qualname__} cannot be read", hint="define async workflows in a file"
        ) from None
    tree = ast.parse(textwrap.dedent("".join(lines)))
    ast.increment_lineno(tree, first - 1)
    function = tree.body[0]
    if not isinstance(function, ast.AsyncFunctionDef | ast.FunctionDef):
        raise BadFlow(f"{user_place()}: {target.__qualname__} is no async def", hint="write it with async def")
    code = target.__code__
    cells = dict(zip(code.co_freevars, target.__closure__ or (), strict=True))
    return WorkflowReader(recorder, code.co_filename, function, cells, target.__globals__)


def _has(node: ast.stmt, kind: type[ast.AST]) -> bool:
    return any(isinstance(inner, kind) for inner in _walk(node))


def _walk(*nodes: ast.AST) -> Iterator[ast.AST]:
    """All nodes inside, except those of nested functions."""
    todo = list(nodes)
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or node in nodes:
            todo += ast.iter_child_nodes(node)


def _stored(node: ast.AST) -> set[str]:
    return {inner.id for inner in _walk(node) if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)}


def _loads(*nodes: ast.AST) -> list[str]:
    found = [inner for node in nodes for inner in ast.walk(node)]
    return [inner.id for inner in found if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load)]


def _loaded(target: ast.expr) -> ast.expr:
    if not isinstance(target, ast.Name):
        raise BadFlow(f"{user_place()}: only names can be changed in a workflow", hint="put the value together in one expression")
    return ast.copy_location(ast.Name(target.id, ast.Load()), target)


def _subclasses(kind: type[BaseException]) -> Iterator[type[BaseException]]:
    yield kind
    for inner in kind.__subclasses__():
        yield from _subclasses(inner)


def _name(node: ast.AST) -> str:
    words = {ast.While: "a while loop", ast.Break: "break", ast.Continue: "continue", ast.Match: "match"}
    return words.get(type(node), type(node).__name__.lower())
