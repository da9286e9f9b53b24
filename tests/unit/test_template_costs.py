"""No operation of a chat template starts before it is known to be small, and what real templates use still
works.
"""

from __future__ import annotations

import tracemalloc
from datetime import datetime

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.exceptions import SecurityError

from llorch_serve.chat import sandbox, template_costs
from llorch_serve.chat.sandbox import TemplateSandbox

MIB = 2**20
# Lists in lists: x has 2 ** 60 values, each level is one list.
NESTED = "{% set n = namespace(x=[1]) %}{% for a in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
NESTED_TOO = NESTED.replace("n.x", "o.x").replace("set n =", "set o =")
TUPLES = NESTED.replace("[n.x, n.x]", "(n.x, n.x)").replace("[1]", "(1,)")
LONG = "{% set x = [0] * 600000 %}{% set y = [0] * 600000 %}"
TEXT = "{% set s = 'ab' * 4000000 %}"
COLLIDING = (
    "{% set n = namespace(x=[]) %}{% for a in range(12000) %}{% set n.x = n.x + [(a, 0)] %}{% endfor %}"
)

ATTACKS = [
    *(f"{LONG}{{{{ x {operator} y }}}}" for operator in ("==", "!=", "<", "<=", ">", ">=", "in")),
    *(f"{NESTED}{NESTED_TOO}{{{{ n.x {operator} o.x }}}}" for operator in ("==", "<", "in", "not in")),
    *(f"{NESTED}{NESTED_TOO}{{{{ n.x is {test}(o.x) }}}}" for test in ("eq", "lt", "in", "equalto")),
    NESTED + NESTED_TOO + "{{ [n.x, 1] | select('eq', o.x) | list }}",
    NESTED + NESTED_TOO + "{{ 1 < 2 < n.x == o.x }}",
    NESTED + NESTED_TOO + "{{ {'a': n.x}.items() == {'a': o.x}.items() }}",
    NESTED + NESTED_TOO + "{{ [n.x].index(o.x) }}",
    NESTED + NESTED_TOO + "{% for a in [1, 2] %}{{ loop.changed(n.x) }}{{ loop.changed(o.x) }}{% endfor %}",
    *(f"{NESTED}{{{{ n.x | {name} }}}}" for name in ("tojson", "string", "join", "sort", "min", "max", "unique")),
    *(f"{NESTED}{{{{ n.x | {name} }}}}" for name in ("sum(start=[])", "trim", "upper", "e", "indent", "replace('a', 'b')")),
    NESTED + "{{ n.x }}",
    NESTED + "{{ n }}",
    NESTED + "{{ n.x ~ '' }}",
    NESTED + "{{ '%s' % n.x }}",
    NESTED + "{{ '{}'.format(n.x) }}",
    NESTED + "{{ '{0!r}'.format(n.x) }}",
    NESTED + "{{ '{x}'.format_map({'x': n.x}) }}",
    NESTED + "{{ '%s' | format(n.x) }}",
    NESTED + "{{ raise_exception(n.x) }}",
    NESTED + "{% set n.n = n %}{{ n }}",
    TUPLES + "{{ {n.x: 1} }}",
    TUPLES + "{{ {}[n.x] }}",
    TUPLES + "{{ {}.get(n.x) }}",
    TUPLES + "{{ dict([(n.x, 1)]) }}",
    TUPLES + "{{ dict.fromkeys([n.x]) }}",
    TUPLES + "{{ n.x in {} }}",
    COLLIDING + "{{ n.x | unique | list }}",
    COLLIDING + "{{ dict.fromkeys(n.x) }}",
    "{{ range(20000) | map('string') | unique | list | length }}",
    "{{ ([[0] * 1000] * 1000) | sum(start=[]) }}",
    "{{ ('%9999d' * 1000000) % 1 }}",
    "{{ ('%9999d' * 100000) | format(1) }}",
    "{{ '%*d' % (100000000, 1) }}",
    "{{ '%.99999999f' % 1 }}",
    "{{ '{:99999999}'.format(1) }}",
    "{{ '{:{}}'.format(1, 99999999) }}",
    "{{ '{:.{}f}'.format(1.5, 99999999) }}",
    "{{ ('{:9999}' * 300000).format(*([1] * 300000)) }}",
    TEXT + "{{ '%(a)s' * 1000 % {'a': s} }}",
    TEXT + "{{ ('{0}' * 1000).format(s) }}",
    TEXT + "{{ s.replace('', s) }}",
    TEXT + "{{ s.replace('a', s) }}",
    TEXT + "{{ s | replace('a', s) }}",
    TEXT + "{{ s.join(s) }}",
    TEXT + "{{ s | join(s) }}",
    TEXT + "{{ s.split('a') }}",
    TEXT + "{{ s.split() }}",
    TEXT + "{{ s | list }}",
    TEXT + "{{ s.rfind('b' * 4000000) }}",
    TEXT + "{{ s.strip('c' * 4000000 + 'ab') }}",
    TEXT + "{{ s | title }}",
    TEXT + "{{ s | int }}",
    TEXT + "{% set m = '<' | safe %}{{ m ~ s }}{% for a in range(200) %}{% set x = m + s %}{% endfor %}",
    TEXT + "{% for a in range(200) %}{% set x = s[1:] %}{% endfor %}",
    TEXT + "{% for a in range(200) %}{% set x = s.upper() %}{% endfor %}",
    TEXT + "{% for a in range(200) %}{% set x = 'q' in s %}{% endfor %}",
    "{% set s = '\n' * 1000000 %}{{ s | indent(1000) }}",
    "{% set s = '\n' * 1000000 %}{{ s | indent('x' * 1000) }}",
    "{{ [[1] * 100000] | tojson(indent=100000) }}",
    "{{ [1, 2] | tojson(separators=('x' * 1000000, ':')) }}",
    "{{ 1.5 | round(8000000, 'floor') }}",
    "{{ 2 ** 64 }}",
    "{{ (2 ** 63 + (2 ** 63 - 1)) * 2 }}",
    "{{ 3 ** -1000000 }}",
    "{{ strftime_now('%9999999d' * 1000000) }}",
    "{{ 'a\tb'.expandtabs(100000000) }}",
    "{{ 'x'.translate({120: 'y' * 1000000}) }}",
    "{{ (5).to_bytes(100000000, 'big') }}",
    "{{ range(100000).count(1.5) }}",
    "{{ {}.keys() - {}.keys() }}",
    *(f"{{{{ 'a' | {name} }}}}" for name in ("urlize", "wordwrap", "truncate", "xmlattr", "pprint", "random", "striptags")),
    "{% for a in range(10) %}{% set x %}" + "x" * 900_000 + "{% endset %}{% endfor %}",
    "{% macro f() %}" + "x" * 900_000 + "{% endmacro %}{% for a in range(10) %}{% set x = f() %}{% endfor %}",
]  # fmt: skip


@pytest.mark.parametrize("source", ATTACKS)
def test_what_would_take_long_or_much_is_refused_before_it_is_done(source: str) -> None:
    template = TemplateSandbox(datetime.now).compile_bounded(source)
    with pytest.raises(jinja2.TemplateError):
        template.render()


def test_the_largest_thing_that_is_done_at_once_is_refused_one_larger(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(template_costs, "MAX_AT_ONCE", 20 * template_costs.NODE)
    template = TemplateSandbox(datetime.now).compile_bounded("{{ x == y }}")
    assert template.render(x=[1] * 3, y=[1] * 3) == "True"
    with pytest.raises(SecurityError, match="at once"):
        template.render(x=[1] * 9, y=[1] * 9)


def test_all_work_of_a_render_comes_out_of_one_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    template = TemplateSandbox(datetime.now).compile_bounded(
        "{% for a in range(n) %}{% set x = s.upper() %}{% endfor %}"
    )
    environment = template.environment
    assert isinstance(environment, TemplateSandbox)
    monkeypatch.setattr(sandbox, "MAX_WORK", 100_000)
    for _ in range(3):  # each render has its own
        environment.start()
        assert template.render(n=10, s="a" * 1000) == ""
    environment.start()
    with pytest.raises(SecurityError, match="more work"):
        template.render(n=100, s="a" * 1000)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 1 < 2 < 3 }}{{ 1 < 3 < 2 }}{{ 'a' in 'cat' }}{{ 3 not in [1, 2] }}", "TrueFalseTrueTrue"),
        ("{{ [1, 2, 3, 4] | select('greaterthan', 2) | list }}", "[3, 4]"),
        ("{{ [3, 1, 2] | sort | join('-') }}{{ [1, 1] | unique | list }}", "1-2-3[1]"),
        ("{{ ['a', 'b'] | map('upper') | join }}", "AB"),
        ("{{ 'yes' if [] | select else 'no' }}", "yes"),  # as everywhere in jinja2, what comes later is true
        ("{{ 'x,y,z'.split(',', 1) }}{{ 'xyz'[::-1] }}{{ 'a-b'.rsplit('-')[-1] }}", "['x', 'y,z']zyxb"),
        ("{{ '%05.1f|%s' % (1.25, 'a') }}{{ '{:>4}|{a}'.format(1, a=2) }}", "001.2|a   1|2"),
        ("{{ '{a[b]}'.format_map({'a': {'b': 1}}) }}{{ '%d' | format(7) }}", "17"),
        ("{{ '<' | e ~ '<' | safe }}{{ ('<b>' | safe) + '<' }}", "&lt;<<b>&lt;"),
        ("{{ {'b': 1, 'a': 2} | dictsort }}{{ {'a': 1}.items() | list }}", "[('a', 2), ('b', 1)][('a', 1)]"),
        ("{{ [1, [2, {'a': 'é'}]] | tojson }}{{ {'a': [1]} | tojson(indent=1) "
            "}}", '[1, [2, {"a": "é"}]]{\n "a": [\n  1\n ]\n}'),
        ("{{ 'a\nb' | indent(2) }}{{ 7 // 2 }}{{ -7 % 3 }}{{ 2 ** 10 }}{{ 1 / 2 }}", "a\n  b3210240.5"),
        ("{% for a in [1, 1, 2] %}{{ loop.changed(a) }}{{ loop.cycle('x', 'y') }}{% endfor "
            "%}", "TruexFalseyTruex"),
        ("{% macro f(a) %}<{{ a }}>{% endmacro %}{{ f(1) ~ f(2) }}{{ none }}{{ nothing }}", "<1><2>None"),
        ("{{ dict(a=1) }}{{ dict([('b', 2)]) }}{{ range(3) | list }}", "{'a': 1}{'b': 2}[0, 1, 2]"),
    ],
)  # fmt: skip
def test_what_templates_use_works_as_in_jinja2(source: str, text: str) -> None:
    bounded = TemplateSandbox(datetime.now).compile_bounded(source)
    assert bounded.render() == text


ATOMS = [
    "1", "0", "-3", "99999999", "1.5", "none", "true", "''", "'ab'", "'%s %5d'", "'{} {:>9}'", "'é€😀'", "s", "x", "d",
    "n.x", "range(50000)", "nothing", "('<' | safe)", "[1, 'a']", "(1, [2])", "{'a': x}", "namespace(x=x)",
]  # fmt: skip
OPERATORS = ["+", "-", "*", "/", "//", "%", "**", "~", "==", "!=", "<", ">=", "in", "not in", "and", "or"]
FILTERS = sorted(TemplateSandbox(datetime.now).filters)
METHODS = sorted(
    {name for kind in (str, list, dict, tuple, int, range) for name in dir(kind) if name[0] != "_"}
)


def expressions() -> st.SearchStrategy[str]:
    def grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        arguments = st.lists(inner, max_size=2).map(", ".join)
        return st.one_of(
            st.tuples(inner, st.sampled_from(OPERATORS), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
            st.tuples(inner, st.sampled_from(FILTERS), arguments).map(lambda t: f"({t[0]} | {t[1]}({t[2]}))"),
            st.tuples(inner, st.sampled_from(METHODS), arguments).map(lambda t: f"{t[0]}.{t[1]}({t[2]})"),
            st.tuples(inner, inner).map(lambda t: f"{t[0]}[{t[1]}:]"),
            st.lists(inner, max_size=3).map(lambda t: f"[{', '.join(t)}]"),
            st.tuples(inner, inner).map(lambda t: f"({t[0]} if {t[1]} else s)"),
        )

    return st.recursive(st.sampled_from(ATOMS), grown, max_leaves=8)


FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a template's refusal may be; none of them is want of memory."""


@settings(max_examples=300, deadline=None)
@given(first=expressions(), second=expressions())
def test_no_expression_takes_more_memory_than_the_budget(first: str, second: str) -> None:
    most = 2**22
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(template_costs, "MAX_AT_ONCE", most)
        patch.setattr(sandbox, "MAX_WORK", most)
        bounded = TemplateSandbox(datetime.now)
        try:
            template = bounded.compile_bounded(
                "{% set n = namespace(x=x) %}{% for a in range(6) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
                f"{{% for a in range(20) %}}{{% set n.x = {first} %}}{{{{ {second} }}}}{{% endfor %}}"
            )
        except (jinja2.TemplateError, SyntaxError):
            return
        bounded.start()
        seen = {"s": "<a, b>\n" * 2000, "x": [1, "a", 2.5], "d": {"a": [1, {"b": "c"}]}}
        tracemalloc.start()
        try:
            template.render(seen)
        except FAULTS:
            pass
        finally:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert peak < 4 * most + 2 * MIB
