"""Renders one chat template in Jinja's immutable sandbox; depends only on Jinja and JSON values.

The sandbox denies a template access to Python's objects and changes to its variables.
:func:`render` limits the size of the template and of the output, but not time or memory:
``"x" * 10**9`` is one expression. Untrusted templates therefore run in the killable process of
:mod:`.guarded_worker`, which imports this module and no larger one.

Templates have the environment that transformers provides: ``raise_exception``, ``strftime_now``,
``tojson`` without HTML escapes, ``{% break %}`` and ``{% continue %}``, and ``{% generation %}``
blocks, which only mark text for training and render as their content.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from jinja2 import TemplateError as JinjaError
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .render_errors import MAX_OUTPUT_CHARS, RenderError, RenderLimit

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.parser import Parser

MAX_TEMPLATE_CHARS = 256 << 10
MAX_ERROR_CHARS = 300


class _GenerationBlock(Extension):
    """``{% generation %} ... {% endgeneration %}`` renders its content."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise JinjaError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _new_dict  # a function, so that the type stays unreachable
    return environment


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> Template:
    return _environment().from_string(source)


def render(
    source: str, variables: Mapping[str, Any], max_output_chars: int = MAX_OUTPUT_CHARS
) -> str:
    """Return the template's text for these variables.

    Raises:
        RenderLimit: the template or its output is too large.
        RenderError: any other failure of the template.

    """
    if len(source) > MAX_TEMPLATE_CHARS:
        raise RenderLimit(f"the template has more than {MAX_TEMPLATE_CHARS} characters")
    try:
        return _joined(_compiled(source), variables, max_output_chars)
    except RenderError:
        raise
    except MemoryError:
        raise RenderLimit("the template needs too much memory") from None
    except JinjaError as error:
        raise RenderError((error.message or type(error).__name__)[:MAX_ERROR_CHARS]) from None
    except Exception as error:  # a template's expressions can raise any exception
        text = f"{type(error).__name__}: {error}"
        raise RenderError(text[:MAX_ERROR_CHARS]) from None


def _joined(template: Template, variables: Mapping[str, Any], limit: int) -> str:
    pieces, size = [], 0
    for piece in template.generate(**variables):
        size += len(piece)
        if size > limit:
            raise RenderLimit(f"the template's output exceeds {limit} characters")
        pieces.append(piece)
    return "".join(pieces)
