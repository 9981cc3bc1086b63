"""How much may a template do, while it is found out how it writes?

A template is a file of the operator, who may have it from anywhere. Jinja's sandbox keeps it from Python and from long
ranges; this environment also counts the steps of its loops, what its filters and methods are given, and the length of
what it joins, so that loops in loops, texts that double and wide columns end with an error, not with a start that
hangs. Needs the optional package `jinja2`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

from jinja2 import nodes, visitor
from jinja2.runtime import Context
from jinja2.sandbox import SandboxedEnvironment

# Of one run: small conversations take some hundred steps, and their text a few thousand letters.
STEPS_MAX = 50_000
CHARS_MAX = 1_000_000
# What a filter or a method reads in about the time of a step.
STEP_CHARS, STEP_ITEMS = 256, 8
# Bits of a number; and digits of a width in a format.
BITS_MAX = 4_096
WIDE = re.compile(r"\d{5}|\*")
# Filters that make nothing longer by a number.
SHORTENING = frozenset(("d", "default", "float", "int", "round", "truncate"))
STEP = "segue_step"
JOIN = "segue_joined"


class LimitedEnvironment(SandboxedEnvironment):
    """Jinja with limits; `steps` is set to zero before each run."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.steps = 0
        self._weighing: set[Callable[..., Any]] = set()
        self.globals[STEP] = self._count
        self.globals[JOIN] = self._joined
        # Writes as many words as one likes.
        del self.globals["lipsum"]

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """A sum or product, unless it is too long."""
        if operator == "*":
            sizes = [len(side) for side in (left, right) if isinstance(side, str | list | tuple)]
            times = [side for side in (left, right) if isinstance(side, int)]
            if sizes and times and sizes[0] * times[0] > CHARS_MAX:
                raise OverflowError("the chat template makes too long a text")
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * (max(1, right) if operator == "**" else 1)
            if max(bits, right.bit_length()) > BITS_MAX:
                raise OverflowError("the chat template computes too large a number")
        if operator == "%" and isinstance(left, str):
            _check_widths(left)
        result = super().call_binop(context, operator, left, right)
        return self._checked(result)

    def call(self, context: Context, called: Any, *args: Any, **options: Any) -> Any:
        """A call, unless it is of a method that would make too long a text."""
        # Formatting has been wrapped by the sandbox.
        method = getattr(called, "__wrapped__", called)
        value = getattr(method, "__self__", None)
        if isinstance(value, str):
            if method.__name__ in ("format", "format_map"):
                _check_widths(value)
            self._weigh((value, *args, *options.values()))
        else:
            self._count()
        return self._checked(super().call(context, called, *args, **options))

    def _weighed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that is not given too much."""

        if function in self._weighing:
            return function

        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            # Only what is whole can be measured.
            args = tuple([*part] if isinstance(part, Iterator) else part for part in args)
            if name == "format":
                _check_widths(str(args[0]))
            given = (*args, *options.values())
            has_widths = name not in SHORTENING
            self._weigh(tuple(part for part in given if has_widths or not isinstance(part, int)))
            return self._checked(function(*args, **options))

        self._weighing.add(call)
        return call

    def _weigh(self, given: Sequence[object]) -> None:
        """Count what a call is given; a text with as many columns, or as long a part in each place, may be too long."""
        sizes = sorted(map(_size, given))
        for part in given:
            if not isinstance(part, int):
                self.steps += _size(part) // (STEP_CHARS if isinstance(part, str) else STEP_ITEMS)
        self._count()
        if len(sizes) > 1 and max(1, sizes[-2]) * sizes[-1] > CHARS_MAX:
            raise OverflowError("the chat template makes too long a text")

    def _generate(self, source: nodes.Template, *args: Any, **options: Any) -> str:
        _Counting().visit(source)
        self.filters = {name: self._weighed(name, each) for name, each in self.filters.items()}
        return super()._generate(source, *args, **options)

    def _count(self) -> str:
        self.steps += 1
        if self.steps > STEPS_MAX:
            raise OverflowError(f"the chat template takes more than {STEPS_MAX:,} steps")
        return ""

    def _joined(self, parts: list[object]) -> str:
        self._count()
        return str(self._checked("".join(map(str, parts))))

    @staticmethod
    def _checked(value: object) -> object:
        if isinstance(value, str | list | tuple) and len(value) > CHARS_MAX:
            raise OverflowError("the chat template makes too long a text")
        return value


def _size(value: object) -> int:
    """How long a value is, or how wide it makes others."""
    if isinstance(value, str | list | tuple | dict | range):
        return len(value)
    return abs(value) if isinstance(value, int) else 0


def _check_widths(text: str) -> None:
    if WIDE.search(text):
        raise OverflowError("the chat template makes too long a text")


class _Counting(visitor.NodeTransformer):
    """Counts where the template loops, calls a macro of its own, or joins texts."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _step(node.lineno))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _step(node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _called(JOIN, [nodes.List(list(node.nodes), lineno=node.lineno)], node.lineno)


def _step(line: int) -> nodes.ExprStmt:
    return nodes.ExprStmt(_called(STEP, [], line), lineno=line)


def _called(name: str, values: list[nodes.Expr], line: int) -> nodes.Call:
    return nodes.Call(nodes.Name(name, "load", lineno=line), values, [], None, None, lineno=line)
