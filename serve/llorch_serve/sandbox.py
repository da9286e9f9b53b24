"""Runs chat templates, which come with a checkpoint and are code that nobody here has read.

jinja2's immutable sandbox keeps a template away from Python's internals; this module also bounds what it may spend.

Bounded: loop iterations, calls and filters (steps), wall-clock time (looked at in each step), characters written
(blocks and macros included), the length of every string, list and number that an operator, call or filter gives, and
every integer that is handed to a call or filter, as widths and counts are. Not bounded: what one single filter or
method builds out of values that are each within bounds, before its result is measured; so a template can still cost
memory, though not for long.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_STEPS = 200_000
MAX_SECONDS = 5.0
MAX_CHARS = 8 * 2**20


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """A jinja2 environment with the settings, filters and functions that chat templates are written for.

    One render at a time: :meth:`start` opens a new budget. Whatever goes beyond raises ``SecurityError``.

    now: the clock behind ``strftime_now``, in local time.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, loopcontrols],
            finalize=self._write,
            optimized=False,  # else constant expressions would be computed, unbounded, while compiling
        )
        self.filters["tojson"] = _tojson
        self.filters = {name: self._bounded_filter(function) for name, function in self.filters.items()}
        self.filters["_steps"] = self._steps
        self.filters["_bounded"] = _checked
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
        self.globals["dict"] = _Dict()
        self.globals["namespace"] = _Namespace
        self.start()

    def start(self) -> None:
        """Open the budget of one render."""
        self._steps_left = MAX_STEPS
        self._chars_left = MAX_CHARS
        self._deadline = time.monotonic() + MAX_SECONDS

    def compile_bounded(self, source: str) -> jinja2.Template:
        """Compile a template whose loops and concatenations are counted. Raises jinja2.TemplateSyntaxError."""
        return self.from_string(_Bounding(self).visit(self.parse(source)))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method for the template."""
        self._spend()
        _check_arguments(args, kwargs)
        if isinstance(obj, LoopContext):  # a recursive loop is called with what it shall go through
            args = tuple(self._steps(iterable) for iterable in args)
        return _checked(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute one of ``intercepted_binops`` for the template."""
        if operator == "*":
            for value, count in ((left, right), (right, left)):
                if isinstance(value, (str, bytes, list, tuple)) and isinstance(count, int):
                    _check_size(len(value) * count)
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_size(left.bit_length() * right)
        if operator == "%" and isinstance(left, (str, bytes)):
            _check_format(left)
        return _checked(super().call_binop(context, operator, left, right))

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        """Refuse an attribute at once; jinja2 would wait until its value is used."""
        raise SecurityError(f"access to attribute {attribute!r} of a {type(obj).__name__} is not allowed")

    def _spend(self) -> None:
        self._steps_left -= 1
        if self._steps_left < 0:
            raise SecurityError(f"the template takes more than {MAX_STEPS} steps")
        if time.monotonic() > self._deadline:
            raise SecurityError(f"the template takes more than {MAX_SECONDS} seconds")

    def _write(self, value: Any) -> Any:
        self._chars_left -= len(value) if isinstance(value, str) else 1
        if self._chars_left < 0:
            raise SecurityError(f"the template writes more than {MAX_CHARS} characters")
        return value

    def _steps(self, iterable: Iterable[Any]) -> Iterator[Any]:
        for item in iterable:
            self._spend()
            yield item

    def _bounded_filter(self, function: Callable[..., Any]) -> Callable[..., Any]:
        # wraps() also keeps jinja2's marks on functions that want the context or environment.
        @functools.wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self._spend()
            _check_arguments(args, kwargs)
            return _checked(function(*args, **kwargs))

        return bounded


class _Bounding(NodeTransformer):
    """Puts loops and concatenations, which no other hook sees, under the sandbox's filters."""

    def __init__(self, environment: jinja2.Environment) -> None:
        self._environment = environment

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - jinja2 looks the method up by this name
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_steps", self._environment)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 - as above
        self.generic_visit(node)
        return _filtered(node, "_bounded", self._environment)


def _filtered(node: nodes.Node, name: str, environment: jinja2.Environment) -> nodes.Filter:
    made = nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
    made.set_environment(environment)
    return made


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the assistant's words for training; here its content is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the block's content in a scope of its own."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Dict:
    """What templates call ``dict``; the type itself has more to grasp."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    @staticmethod
    def fromkeys(keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        """Return a dict of ``keys`` with one value."""
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


def _check_format(pattern: str | bytes) -> None:
    # A width is written in the format itself, where nothing else measures it.
    text = pattern if isinstance(pattern, str) else pattern.decode("latin-1")
    if re.search(r"\d{5}|\*", text):
        raise SecurityError(
            "the template formats with a width above 9999 or a computed one, which is not allowed"
        )


def _check_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, int):
            _check_size(abs(value))


def _checked(value: Any) -> Any:
    if isinstance(value, (str, bytes, list, tuple)):
        _check_size(len(value))
    elif isinstance(value, int):
        _check_size(value.bit_length())
    return value


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models are trained on it: without the HTML escapes of jinja2's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
