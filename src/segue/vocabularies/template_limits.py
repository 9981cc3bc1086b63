"""How much may a template do, while it is found out how it writes?

A template is a file of the operator, who may have it from anywhere. Jinja's sandbox keeps it from Python and from long
ranges; this environment also counts the steps of its loops and the length of what it joins, so that loops in loops and
texts that double end with an error, not with a start that hangs. Needs the optional package `jinja2`.
"""

from __future__ import annotations

from typing import Any

from jinja2 import nodes, visitor
from jinja2.runtime import Context
from jinja2.sandbox import SandboxedEnvironment

# Of one run: small conversations take some hundred steps, and their text a few thousand letters.
STEPS_MAX = 50_000
CHARS_MAX = 1_000_000
STEP = "segue_step"
JOIN = "segue_joined"


class LimitedEnvironment(SandboxedEnvironment):
    """Jinja with limits; `steps` is set to zero before each run."""

    intercepted_binops = frozenset(("+", "*", "**"))

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.steps = 0
        self.globals[STEP] = self._count
        self.globals[JOIN] = self._joined

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """A sum or product, unless it is too long."""
        if operator == "*":
            sizes = [len(side) for side in (left, right) if isinstance(side, str | list | tuple)]
            times = [side for side in (left, right) if isinstance(side, int)]
            if sizes and times and sizes[0] * times[0] > CHARS_MAX:
                raise OverflowError("the chat template makes too long a text")
        if operator == "**" and isinstance(right, int | float) and right > 64:
            raise OverflowError("the chat template computes too large a number")
        result = super().call_binop(context, operator, left, right)
        return self._checked(result)

    def _generate(self, source: nodes.Template, *args: Any, **options: Any) -> str:
        _Counting().visit(source)
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
