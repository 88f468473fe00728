"""Rewriting a forward so that each of its operations is a call that can be tapped.

The engine does this for calls and assignments. Here operators count too: what a block
adds is often a product that no call makes (``residual + x * multiplier``), and only at the
multiplication can it be read and written. Labels of calls and assignments stay the engine's own.
"""

from __future__ import annotations

import ast
import inspect
import operator
from collections.abc import Callable
from functools import lru_cache
from types import CodeType
from typing import Any

from explorer.engine.nnsight_api import (
    BIND,
    OP,
    SHELL,
    EngineInstrument,
    SourceNotAvailable,
    bind,
    decorator_chain,
    function_like,
    rewrap,
    source_tree,
)

#: Operators that are made calls, by their node's name, plain and in place.
_OPERATORS = {"Add": "add", "Sub": "sub", "Mult": "mul", "Div": "truediv", "MatMult": "matmul"}

#: The functions such a call may be of, with what each result is called.
OPERATORS = {
    function: word
    for name, word in (
        ("add", "sum"),
        ("sub", "difference"),
        ("mul", "product"),
        ("truediv", "quotient"),
        ("matmul", "matrix product"),
    )
    for function in (getattr(operator, name), getattr(operator, f"i{name}"))
}

_PREFIX = "__bestiary_"
_GLOBALS = {f"{_PREFIX}{function.__name__}__": function for function in OPERATORS}
_COMPILED: dict[CodeType, CodeType] = {}

#: The decorators around a function. The engine parses each one's source for that, which costs
#: more than a block's forward.
_decorators = lru_cache(maxsize=1024)(decorator_chain)


class _Rewriter(EngineInstrument):
    """The engine's rewriting of calls and assignments, with operators as ``operator_mul_0``."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        name = _OPERATORS.get(type(node.op).__name__)
        return node if name is None else self._operator(name, node.left, node.right, node)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        node.value = self.visit(node.value)
        name = _OPERATORS.get(type(node.op).__name__)
        if name is None or not isinstance(node.target, ast.Name):
            return node
        before = ast.copy_location(ast.Name(id=node.target.id, ctx=ast.Load()), node)
        value = self._operator(f"i{name}", before, node.value, node)
        return ast.copy_location(ast.Assign(targets=[node.target], value=value), node)

    def _operator(self, name: str, left: ast.expr, right: ast.expr, node: ast.AST) -> ast.Call:
        function = ast.Name(id=f"{_PREFIX}{name}__", ctx=ast.Load())
        return self.wrap(f"operator_{name}", function, [left, right], [], node)


def _compiled(func: Callable) -> CodeType:
    """Return the rewritten code of a Python function.

    Raises SourceNotAvailable where there is none to rewrite.
    """
    own = getattr(func, "__code__", None)
    if own is None:
        raise SourceNotAvailable("the callable has no Python source")
    if own not in _COMPILED:
        tree, start, _ = source_tree(own)
        definition = tree.body[0]
        if not isinstance(definition, ast.FunctionDef):
            raise SourceNotAvailable("the callable is not a plain function")
        definition.decorator_list = []
        _Rewriter().visit(tree)
        # Compile it within a function that has its free variables, so that they stay free.
        shell = ast.FunctionDef(
            name=SHELL,
            decorator_list=[],
            args=ast.arguments(
                posonlyargs=[],
                args=[ast.arg(arg=name) for name in own.co_freevars],
                kwonlyargs=[],
                kw_defaults=[],
                defaults=[],
            ),
            body=[definition, ast.Return(value=ast.Name(id=definition.name, ctx=ast.Load()))],
        )
        tree.body[0] = ast.copy_location(shell, definition)
        ast.increment_lineno(tree, start - 1)
        ast.fix_missing_locations(tree)
        module = compile(tree, own.co_filename, "exec")
        _COMPILED[own] = _nested(_nested(module, SHELL), own.co_name)
    return _COMPILED[own]


def _nested(code: CodeType, name: str) -> CodeType:
    return next(c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name)


def instrumented(fn: Callable, op: Callable[..., Any]) -> Callable:
    """Return a copy of ``fn`` that runs its calls, assignments and operators through ``op``.

    ``op(location, fn, *args, **kwargs)`` has to run ``fn`` and return what the forward goes on
    with; decorators stay around the copy, and a bound method stays bound.
    Raises SourceNotAvailable for what has no Python source.
    """
    called = inspect.getattr_static(type(fn), "__call__", None)
    if not (inspect.isfunction(fn) or inspect.ismethod(fn)) and inspect.isfunction(called):
        fn = fn.__call__
    receiver = fn.__self__ if inspect.ismethod(fn) else None
    inner, chain = _decorators(fn.__func__ if receiver is not None else fn)
    code = _compiled(inner)
    cells = dict(zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True))
    closure = tuple(cells[name] for name in code.co_freevars) or None
    built = rewrap(chain, function_like(inner, code, closure, **{OP: op, BIND: bind}, **_GLOBALS))
    return built.__get__(receiver) if receiver is not None else built
