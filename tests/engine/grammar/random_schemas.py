"""Random schemas, and random answers that a compiled schema lets end."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import jsonschema
import numpy as np

from baton.deploy.config import demo_model_folder
from baton.engine.grammar.compiler import compile_schema, load_tokenizer

EOS = (0, 2)
TOKENIZER = load_tokenizer(demo_model_folder(), 1024, EOS)
MOST_TOKENS = 60
_EDGES = [
    0, 1, -1, 2, 7, 10, 99, 100, -100, 0.5, -0.5, 0.1, -0.3, 2.25, 99.5, 1e-5, -1e-5, 0.001, 1e15,
    2**53, 2**53 + 1, -(2**53) - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 1e18, -1e18, 1e20, -1e20,
    1e-60, -1e-60, 1.0000000000000002,
]  # fmt: skip


def bound(rnd: random.Random) -> int | float:
    """An edge, a number beside one, or a decimal of few digits."""
    if rnd.random() < 0.5:
        edge = rnd.choice(_EDGES)
        return rnd.choice([edge, edge + 1, edge - 1, edge * 1.5, float(np.nextafter(edge, 9e99))])
    digits = rnd.randrange(4)
    return rnd.randrange(-3000, 3000) / 10**digits if digits else rnd.randrange(-3000, 3000)


def number_schema(rnd: random.Random) -> dict[str, Any]:
    """A schema of numbers by one to four keywords, often with close bounds."""
    schema: dict[str, Any] = {}
    if rnd.random() < 0.9:
        schema["type"] = rnd.choice(["number", "integer", ["integer", "null"]])
    low = bound(rnd)
    gap = rnd.choice([0, 1e-4, 0.01, 0.5, 1, 2, 10, 1000, abs(low)])
    if rnd.random() < 0.8:
        schema[rnd.choice(["minimum", "exclusiveMinimum"])] = low
    if rnd.random() < 0.8:
        schema[rnd.choice(["maximum", "exclusiveMaximum"])] = low + gap
    if rnd.random() < 0.15:
        schema[rnd.choice(["minimum", "exclusiveMaximum"])] = bound(rnd)
    if rnd.random() < 0.25:
        schema["multipleOf"] = rnd.choice([1, 2, 3, 7, 25, 0.5, 0.25, 0.1, 0.01, 1.5])
    if rnd.random() < 0.08:
        schema["enum"] = [bound(rnd) for _ in range(rnd.randrange(1, 4))]
    if rnd.random() < 0.05:
        schema["const"] = bound(rnd)
    if "type" not in schema:  # without one any other value is an instance
        schema = {"allOf": [schema, {"type": rnd.choice(["number", "integer"])}]}
    return schema


def mixed_schema(rnd: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema of objects, lists, unions and references with numbers and texts inside."""
    kind = rnd.randrange(9 if depth else 4)
    if kind < 2:
        return number_schema(rnd)
    if kind == 2:
        return {
            "enum": [rnd.choice([None, True, "a", "\u2028", 2, 0.5, [1, {"x": 2}], bound(rnd)])]
        }
    if kind == 3:
        least = rnd.randrange(3)
        pattern = rnd.choice([r"^\s{1,3}$", "^a.b$", r"^[\s\d]{2}$", r"^\w+$", "^[^a]{1,4}$"])
        return {"type": "string", **rnd.choice(
            [{"minLength": least, "maxLength": least + 2}, {"pattern": pattern}]
        )}  # fmt: skip
    inner = [mixed_schema(rnd, depth - 1) for _ in range(rnd.randrange(1, 4))]
    if kind in (4, 5):
        names = [rnd.choice(["a", "b", "ü", 'q"']) + str(at) for at in range(len(inner))]
        return {"type": "object", "properties": dict(zip(names, inner, strict=True)),
                "required": [one for one in names if rnd.random() < 0.6],
                "additionalProperties": False}  # fmt: skip
    if kind == 6:
        least = rnd.randrange(3)
        return {"type": "array", "items": inner[0], "minItems": least, "maxItems": least + 1}
    if kind == 7:
        return {"anyOf": inner}
    return {"type": "array", "prefixItems": inner, "items": False, "minItems": rnd.randrange(2)}


def answers(schema: dict[str, Any], rnd: random.Random, count: int) -> Iterator[str]:
    """Yield texts of random allowed tokens that end by themselves."""
    start = compile_schema(TOKENIZER, json.dumps(schema))
    for _ in range(count):
        matcher, tokens = start.deep_copy(), []
        while len(tokens) < MOST_TOKENS:
            ends = matcher.is_accepting()
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = [t for t in np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
                       if t not in EOS]  # fmt: skip
            if ends and (not allowed or rnd.random() < 0.4):
                yield TOKENIZER.decode_str(tokens)
                break
            assert allowed, "a dead end"
            token = rnd.choice(allowed)
            assert matcher.consume_token(token)
            tokens.append(token)


def accepts(schema: dict[str, Any], text: str) -> bool:
    """Whether the compiled schema lets this text end."""
    matcher = compile_schema(TOKENIZER, json.dumps(schema)).deep_copy()
    return all(map(matcher.consume_token, TOKENIZER.tokenize_str(text))) and matcher.is_accepting()


def is_instance(schema: dict[str, Any], text: str) -> bool:
    """Whether jsonschema takes a text: by doubles, but multiples by the decimals that are written.

    0.3 is a multiple of 0.1, though not by a division of doubles.
    """
    exact = json.loads(json.dumps(schema), parse_float=Fraction)
    return _valid(_without_multiples(schema), json.loads(text)) and _valid(
        exact, json.loads(text, parse_float=_exactly)
    )


def _exactly(text: str) -> Fraction | float:
    _, _, exponent = text.lower().partition("e")
    return Fraction(text) if len(exponent) < 4 else float(text)


def _without_multiples(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {k: _without_multiples(v) for k, v in schema.items() if k != "multipleOf"}
    return [*map(_without_multiples, schema)] if isinstance(schema, list) else schema


def _valid(schema: Any, value: Any) -> bool:
    return bool(_Validator(schema).is_valid(value))


def _is_number(_: object, one: object) -> bool:
    return isinstance(one, int | float | Fraction) and not isinstance(one, bool)


def _matches(_: object, pattern: str, value: object, __: object) -> Iterator[Any]:
    r"""As jsonschema, but what ``\s`` and ``.`` match is that of ECMA-262."""
    spaces = r"\t-\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
    ecma = pattern.replace(r"[\s", "[" + spaces).replace(r"\s", f"[{spaces}]")
    ecma = ecma.replace(".", r"[^\n\r\u2028\u2029]")
    if isinstance(value, str) and not re.search(ecma, value, re.ASCII):
        yield jsonschema.ValidationError(f"{value!r} does not match {pattern!r}")


_Validator = jsonschema.validators.extend(
    jsonschema.Draft202012Validator,
    validators={"pattern": _matches},
    type_checker=jsonschema.Draft202012Validator.TYPE_CHECKER.redefine_many(
        {
            "number": _is_number,
            "integer": lambda _, one: _is_number(_, one) and one == int(one),
        }
    ),
)
