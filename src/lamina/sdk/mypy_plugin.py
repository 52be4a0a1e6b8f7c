"""mypy plugin: under `@app.function(...)` a class is a `Function`; mypy overlooks what a decorator makes of a class.

In its settings: `plugins = ["lamina.sdk.mypy_plugin"]`. Other checkers need nothing. Names are bound before types are known, so
the class stays a class to mypy; what is called or asked of it is answered as by the function.
"""

from __future__ import annotations

from collections.abc import Callable

from mypy.checker import TypeChecker
from mypy.nodes import (
    ARG_STAR,
    ARG_STAR2,
    AssignmentStmt,
    CallExpr,
    Context,
    Expression,
    IntExpr,
    MemberExpr,
    NameExpr,
    RefExpr,
    TypeInfo,
    Var,
)
from mypy.plugin import AttributeContext, CheckerPluginInterface, ClassDefContext, FunctionSigContext, Plugin
from mypy.semanal import SemanticAnalyzer
from mypy.typeops import bind_self
from mypy.types import AnyType, CallableType, FunctionLike, Instance, Parameters, Type, TypeOfAny, get_proper_type

APP, FUNCTION, TORCH_MODEL = "lamina.sdk.app.App", "lamina.sdk.function.Function", "lamina.sdk.torch_model.TorchModel"
NOTE = "lamina"  #: among a class's metadata, which mypy keeps from run to run


class LaminaPlugin(Plugin):
    def get_customize_class_mro_hook(self, fullname: str) -> Callable[[ClassDefContext], None] | None:
        return None if fullname.startswith(("builtins.", "typing.", "lamina.")) else _note

    def get_function_signature_hook(self, fullname: str) -> Callable[[FunctionSigContext], FunctionLike] | None:
        function = self._function(fullname)
        return None if function is None else lambda asked: _call_of(function, asked)

    def get_class_attribute_hook(self, fullname: str) -> Callable[[AttributeContext], Type] | None:
        owner, _, name = fullname.rpartition(".")
        function = self._function(owner)
        return None if function is None else lambda asked: _member_of(function, name, asked.api, asked.context)

    def _function(self, fullname: str) -> Instance | None:
        """`Function[P, R]` of a marked class."""
        info, generic = self._class(fullname), self._class(FUNCTION)
        if info is None or generic is None or NOTE not in info.metadata:
            return None
        return Instance(generic, _types_of(info))

    def _class(self, fullname: str) -> TypeInfo | None:
        found = self.lookup_fully_qualified(fullname) if "." in fullname else None
        return found.node if found is not None and isinstance(found.node, TypeInfo) else None


def plugin(version: str) -> type[Plugin]:
    """Entry point for mypy."""
    return LaminaPlugin


def _note(defined: ClassDefContext) -> None:
    """Mark decorated classes. Names are bound here, and types not yet known, so decorators are read as they are written."""
    for decorator in defined.cls.decorators:
        if (
            isinstance(decorator, CallExpr)
            and isinstance(decorator.callee, MemberExpr)
            and decorator.callee.name == "function"
            and _is_app(decorator.callee.expr, defined)
        ):
            batch = dict(zip(decorator.arg_names, decorator.args, strict=True)).get("batch")
            info = defined.cls.info
            batched = (batch is not None and not (isinstance(batch, IntExpr) and batch.value == 1)) or info.has_base(TORCH_MODEL)
            info.metadata[NOTE] = {"batched": batched}
            info.meta_fallback_to_any = True  # what only the function has comes to `_member_of`


def _is_app(expression: Expression, defined: ClassDefContext) -> bool:
    assert isinstance(defined.api, SemanticAnalyzer)
    if not isinstance(expression, NameExpr | MemberExpr):
        return False
    if not isinstance(expression.node, Var):
        found = defined.api.lookup(expression.name, expression) if isinstance(expression, NameExpr) else None
        variable = found.node if found else None
    else:
        variable = expression.node
    if not isinstance(variable, Var):
        return False
    known = get_proper_type(variable.type)
    if known is not None:
        return isinstance(known, Instance) and known.type.has_base(APP)
    home = defined.api.modules.get(variable.fullname.rpartition(".")[0])
    for statement in home.defs if home else ():
        if isinstance(statement, AssignmentStmt) and isinstance(statement.rvalue, CallExpr):
            names = [left.name for left in statement.lvalues if isinstance(left, NameExpr)]
            made_by = statement.rvalue.callee
            if variable.name in names and isinstance(made_by, RefExpr) and isinstance(made_by.node, TypeInfo):
                return made_by.node.has_base(APP)
    return False


def _types_of(info: TypeInfo) -> list[Type]:
    """P and R of the function: those of its `__call__`, or any, where one request is an entry of lists."""
    called = info.get("__call__")
    handler = get_proper_type(called.type) if called else None
    if info.metadata[NOTE]["batched"] or not isinstance(handler, CallableType):
        anything = AnyType(TypeOfAny.explicit)
        return [Parameters([anything, anything], [ARG_STAR, ARG_STAR2], [None, None], is_ellipsis_args=True), anything]
    bound = bind_self(handler)
    return [Parameters(bound.arg_types, bound.arg_kinds, bound.arg_names, variables=bound.variables), bound.ret_type]


def _call_of(function: Instance, asked: FunctionSigContext) -> FunctionLike:
    signature = _member_of(function, "__call__", asked.api, asked.context)
    return signature if isinstance(signature, FunctionLike) else asked.default_signature


def _member_of(function: Instance, name: str, api: CheckerPluginInterface, where: Context) -> Type:
    assert isinstance(api, TypeChecker)
    return get_proper_type(api.expr_checker.analyze_external_member_access(name, function, where))
