"""Runs chat templates, which come with a checkpoint and are code that nobody here has read.

jinja2's immutable sandbox keeps a template away from Python's internals; this module also bounds what it may
spend. Loop iterations, calls and filters are steps, of which there are so many. Before one of them, a test or
an operator is done its cost is known (``template_costs.py``), is within what one operation may take, and
comes out of the render's budget, which so bounds time and memory. What is written, blocks and macros
included, is counted too. A method or filter whose cost is not known there is refused. The clock, looked at in
each step, ends what is merely slow.
"""

from __future__ import annotations

import functools
import json
import math
import operator
import time
import types
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, TemplateReference
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Cycler, Joiner, pass_context
from jinja2.visitor import NodeTransformer
from markupsafe import EscapeFormatter, Markup

from llorch_serve.chat import template_costs as costs

MAX_STEPS = 200_000
MAX_SECONDS = 5.0
MAX_CHARS = 8 * 2**20
MAX_WORK = 2**28
"""Of one render, in the units of ``template_costs.py``: about a quarter of a second, or of a GiB."""

MAX_INT_BITS = 64
_MAX_PATTERN_CHARS = 1000  # of a date
_MAX_INDENT = 100  # of JSON

_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "lteq": operator.le,
    "gt": operator.gt,
    "gteq": operator.ge,
    "in": lambda item, container: item in container,
    "notin": lambda item, container: item not in container,
}
_OPEN_TYPES = (jinja2.utils.Namespace, Macro, BlockReference, TemplateReference, Cycler, Joiner, LoopContext)
"""Of the template engine itself, made to be asked for attributes."""


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """A jinja2 environment with the settings, filters and functions that chat templates are written for.

    One render at a time: :meth:`start` opens a new budget. Whatever goes beyond raises ``SecurityError``.

    now: the clock behind ``strftime_now``, in local time.
    """

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, loopcontrols],
            optimized=False,  # else constant expressions would be computed, unbounded, while compiling
        )
        self.filters["tojson"] = self._tojson
        self.filters = {name: self._bounded_filter(name, made) for name, made in self.filters.items()}
        tests: dict[str, Any] = self.tests
        self.tests = {name: self._bounded_test(name, made) for name, made in tests.items()}
        self.filters |= {
            "_steps": self._steps,
            "_bounded": _checked,
            "_written": self._written,
            "_text": self._text,
            "_compare": self._compare,
            "_sliced": self._sliced,
            "_key": self._key,
        }
        self.globals["raise_exception"] = self._raise_exception
        self.globals["strftime_now"] = lambda pattern: now().strftime(_date_pattern(pattern))
        self.globals["dict"] = _Dict(self._charge)
        self.globals["namespace"] = _Namespace
        del self.globals["lipsum"]
        self.start()

    def start(self) -> None:
        """Open the budget of one render."""
        self._steps_left = MAX_STEPS
        self._chars_left = MAX_CHARS
        self._work_left = MAX_WORK
        self._deadline = time.monotonic() + MAX_SECONDS

    def compile_bounded(self, source: str) -> jinja2.Template:
        """Compile a template in which everything is counted. Raises jinja2.TemplateSyntaxError."""
        return self.from_string(_Bounding(self).visit(self.parse(source)))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method for the template."""
        self._spend()
        _check_arguments(args, kwargs)
        self._charge(costs.NODE * (1 + len(args) + len(kwargs)))
        if isinstance(obj, LoopContext):  # a recursive loop is called with what it shall go through
            args = tuple(self._steps(iterable) for iterable in args)
        if isinstance(obj, (types.BuiltinMethodType, types.MethodType)):
            args = tuple(map(costs.listed, args))
            cost = _cost_of(obj.__self__, obj.__name__)
            if cost is not None:
                self._charge_for(cost, obj.__self__, (*args, *_own(kwargs)))
        return self._counted(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute one of ``intercepted_binops`` for the template."""
        self._charge(_binop_cost(operator, left, right) * costs.escaping((left, right)))
        return _checked(super().call_binop(context, operator, left, right))

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Look an item up for the template."""
        return super().getitem(obj, self._key(argument))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Allow the methods whose costs are known, and what the template engine offers."""
        if not super().is_safe_attribute(obj, attr, value):
            return False
        return isinstance(obj, (*_OPEN_TYPES, _Dict)) or _cost_of(obj, attr) is not None

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return a counted ``format`` in place of a text's own."""
        if super().wrap_str_format(value) is None:
            return None
        pattern, by_map = value.__self__, value.__name__ == "format_map"

        def formatted(*args: Any, **kwargs: Any) -> str:
            self._charge(10 * costs.size(pattern))
            if isinstance(pattern, Markup):
                formatter: _Formatter = _EscapeFormatter(self, escape=pattern.escape)
            else:
                formatter = _Formatter(self)
            if by_map:
                [kwargs], args = args, ()
            made: str = type(pattern)(formatter.vformat(pattern, args, kwargs))
            return made

        return formatted

    def format_field(self, value: Any, spec: str) -> None:
        """Count one field of ``format``."""
        self._spend()
        self._charge(costs.field(value, spec))

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        """Refuse an attribute at once; jinja2 would wait until its value is used."""
        raise SecurityError(f"access to attribute {attribute!r} of a {type(obj).__name__} is not allowed")

    def _spend(self) -> None:
        self._steps_left -= 1
        if self._steps_left < 0:
            raise SecurityError(f"the template takes more than {MAX_STEPS} steps")
        if time.monotonic() > self._deadline:
            raise SecurityError(f"the template takes more than {MAX_SECONDS} seconds")

    def _charge(self, units: int) -> None:
        if units > costs.MAX_AT_ONCE:
            raise costs.too_much(units)
        self._work_left -= units
        if self._work_left < 0:
            raise SecurityError(f"the template does more work than {MAX_WORK}")

    def _charge_for(self, cost: costs.Cost, value: Any, given: tuple[Any, ...]) -> None:
        self._charge(cost(value, given) * costs.escaping((value, *given)))

    def _counted(self, value: Any) -> Any:
        """Return what a call or filter gave; what it still gives, one by one, is counted when it does."""
        if isinstance(value, Iterator) and not isinstance(value, LoopContext):
            return self._steps(value)
        return _checked(value)

    def _steps(self, iterable: Iterable[Any]) -> Iterator[Any]:
        for item in iterable:
            self._spend()
            yield item

    def _text(self, value: Any) -> Any:
        """Count a value that is to be text, and leave it to jinja2 to make it so."""
        self._charge(costs.text(value))
        return value

    @pass_context
    def _written(self, _context: Context, value: Any) -> str:
        # It asks for the context, since jinja2 would compute the others' constant arguments while compiling.
        text = str(self._text(value))
        self._chars_left -= len(text)
        if self._chars_left < 0:
            raise SecurityError(f"the template writes more than {MAX_CHARS} characters")
        return text

    def _compare(self, left: Any, *rest: Any) -> Any:
        """Compare one value after another, as in ``a < b < c``; rest: names of comparisons, each with a
        value.
        """
        outcome = None
        left = costs.listed(left)
        for name, right in zip(rest[::2], rest[1::2], strict=True):
            right = costs.listed(right)
            self._charge(costs.NODE + costs.comparison(name, left, right))
            outcome = _COMPARISONS[name](left, right)
            if not outcome:
                break
            left = right
        return outcome

    def _sliced(self, value: Any) -> Any:
        self._charge(costs.size(value))
        return value

    def _key(self, value: Any) -> Any:
        """Count a key, whose parts are all looked at."""
        if not costs.is_scalar(value):
            self._charge(costs.text(value))
        return value

    def _bounded_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        cost = costs.FILTERS.get(name)

        # wraps() also keeps jinja2's marks on functions that want the context or environment.
        @functools.wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self._spend()
            if cost is None:
                raise SecurityError(f"the filter {name!r} is not allowed")
            _check_arguments(args, kwargs)
            asked = isinstance(args[0], (Context, nodes.EvalContext, jinja2.Environment))
            before, (value, *given) = args[:asked], args[asked:]
            if name in costs.EAGER_FILTERS:
                value = costs.listed(value)
            if name in costs.TEXT_FILTERS and not isinstance(value, str):
                value = str(self._text(value))
            self._charge_for(cost, value, (*given, *kwargs.values()))
            return self._counted(function(*before, value, *given, **kwargs))

        return bounded

    def _bounded_test(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            if name in costs.COMPARING_TESTS:
                left, right = args[-2:]
                return self._compare(left, costs.COMPARING_TESTS[name], right)
            self._charge(costs.NODE)
            if name not in costs.FREE_TESTS:
                self._charge(
                    sum(costs.text(value) for value in args if not isinstance(value, jinja2.Environment))
                )
            return function(*args, **kwargs)

        return bounded

    def _raise_exception(self, message: Any) -> NoReturn:
        raise jinja2.TemplateError(str(self._text(message)))

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON as models are trained on it: without the HTML escapes of jinja2's own filter."""
        for text in (indent, *(separators or ())):
            if (len(text) if isinstance(text, str) else text or 0) > _MAX_INDENT:
                raise SecurityError(
                    f"the template indents or separates JSON by more than {_MAX_INDENT} characters"
                )
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        if indent is None:
            return encoder.encode(value)
        pieces = []
        for piece in encoder.iterencode(value):
            self._spend()
            self._charge(costs.size(piece))
            pieces.append(piece)
        return "".join(pieces)


class _Formatter(SandboxedFormatter):
    """``format`` with each field counted before it is made."""

    def __init__(self, sandbox: TemplateSandbox, **kwargs: Any) -> None:
        super().__init__(sandbox, **kwargs)
        self._sandbox = sandbox

    def convert_field(self, value: Any, conversion: Any) -> Any:
        self._sandbox.format_field(value, "")
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> Any:
        self._sandbox.format_field(value, format_spec)
        return super().format_field(value, format_spec)


class _EscapeFormatter(_Formatter, EscapeFormatter):
    pass


class _Bounding(NodeTransformer):
    """Puts what no hook of jinja2's sees under the sandbox's filters."""

    def __init__(self, environment: jinja2.Environment) -> None:
        self._environment = environment

    def _under(self, name: str, node: Any, *args: nodes.Expr) -> nodes.Filter:
        made = nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)
        made.set_environment(self._environment)
        return made

    # jinja2 looks the methods up by these names.

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.iter = self._under("_steps", node.iter)
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [self._under("_written", part) for part in node.nodes]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [self._under("_text", part) for part in node.nodes]
        return self._under("_bounded", node)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        rest = [part for operand in node.ops for part in (nodes.Const(operand.op), operand.expr)]
        return self._under("_compare", node.expr, *rest)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = self._under("_sliced", node.node)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.key = self._under("_key", node.key)
        return node

    def visit_Const(self, node: nodes.Const) -> nodes.Node:  # noqa: N802
        if isinstance(node.value, int) and node.value.bit_length() > MAX_INT_BITS:
            raise jinja2.TemplateSyntaxError(f"a number has more than {MAX_INT_BITS} bits", node.lineno)
        if isinstance(node.value, float) and not math.isfinite(node.value):
            raise jinja2.TemplateSyntaxError("a number is too large", node.lineno)
        return node

    def visit_ScopedEvalContextModifier(self, node: nodes.Node) -> nodes.Node:  # noqa: N802
        raise jinja2.TemplateSyntaxError("autoescape is not allowed in a chat template", node.lineno)


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the assistant's words for training; here its content is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the block's content in a scope of its own."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Dict:
    """What templates call ``dict``; the type itself has more to grasp."""

    def __init__(self, charge: Callable[[int], None]) -> None:
        self._charge = charge

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        args = tuple(map(costs.listed, args))
        self._charge(costs.dict_of(args))
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        """Return a dict of ``keys`` with one value."""
        keys = costs.listed(keys)
        self._charge(costs.dict_of((keys,)))
        return dict.fromkeys(keys, value)


class _Namespace(jinja2.utils.Namespace):
    """jinja2's namespace without names that begin with an underscore, by which Python would find hooks."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(
            f"a namespace cannot have the attribute {name[:100]!r}; choose a name without underscore in front"
        )


def _check_size(size: int) -> None:
    if size > MAX_CHARS:
        raise SecurityError(f"the template builds a value of size {size}; at most {MAX_CHARS} is allowed")


def _check_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, int):
            _check_size(abs(value))


def _checked(value: Any) -> Any:
    if isinstance(value, (str, bytes, list, tuple)):
        _check_size(len(value))
    elif isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
        raise SecurityError(f"the template computes a number of more than {MAX_INT_BITS} bits")
    return value


def _cost_of(owner: Any, name: str) -> costs.Cost | None:
    """Return what a method costs; None: it is no known one."""
    for kind, methods in costs.METHODS:
        if isinstance(owner, kind):
            return methods.get(name)
    return None


def _own(kwargs: dict[str, Any]) -> Iterator[Any]:
    """Give the template's own named arguments; jinja2 adds some."""
    return (value for name, value in kwargs.items() if not name.startswith("_"))


def _binop_cost(operator: str, left: Any, right: Any) -> int:
    """Return the cost of an operator. Raises SecurityError for a value of a type that it is not known for, or
    is too large.
    """
    if operator == "%" and isinstance(left, str):
        return costs.percent(left, right)
    if operator == "*":
        for value, count in ((left, right), (right, left)):
            if isinstance(value, (str, list, tuple)) and isinstance(count, int):
                return costs.size(value) * max(1, count)
    if operator == "+" and isinstance(left, (str, list, tuple)):
        return costs.size(left) + costs.size(right)
    if operator == "**" and isinstance(left, int) and isinstance(right, int):
        _check_size(left.bit_length() * abs(right))
        if left.bit_length() * abs(right) > 2 * MAX_INT_BITS:
            raise SecurityError(f"the template computes a number of more than {MAX_INT_BITS} bits")
    if not costs.is_scalar(left) or not costs.is_scalar(right):
        names = f"{type(left).__name__} and {type(right).__name__}"
        raise SecurityError(f"the template computes {operator} of {names}, which is not allowed")
    return costs.NODE


def _date_pattern(pattern: str) -> str:
    if len(pattern) > _MAX_PATTERN_CHARS:
        raise SecurityError(
            f"the template writes the date by a pattern of {len(pattern)} characters; at most "
            f"{_MAX_PATTERN_CHARS} are allowed"
        )
    return pattern
