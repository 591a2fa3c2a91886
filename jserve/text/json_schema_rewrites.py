"""Writes keywords of JSON Schema that the compiler of grammars does not know in those that it does.
Knows the keywords' meaning: no grammar, and not which schemas are supported.

Every value that fits the result fits the schema. The reverse holds too, but where `Logic.negation`
leaves something out. What cannot be written so stays as it is, to be refused by its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations
from math import floor, inf, ulp
from typing import Any

from jserve.errors import InvalidRequest
from jserve.text.json_parts import numbers_in, pointed_to, refs_in, size
from jserve.text.json_schema_keywords import ANNOTATIONS, OF_SCHEMAS, OF_SCHEMAS_BY_NAME
from jserve.text.json_schema_logic import Logic, Schema, types_of

MAX_CHARS, MAX_GROWTH = 2**17, 4  # of a result: the larger of the two bounds
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_EVALUATED_SOMETIMES = frozenset(
    {"anyOf", "oneOf", "if", "then", "else", "dependentSchemas", "dependencies", "contains"}
)
_OF_NAMES = frozenset({"allOf", "type", "minLength", "maxLength"}) | ANNOTATIONS


def rewritten(schema: dict[str, Any], ref_stands_alone: bool) -> dict[str, Any]:
    """`schema`, written with fewer keywords; all of them where it is malformed, or where a $ref
    would lead elsewhere.

    Raises:
      InvalidRequest: it would take too long, or become too large.
    """
    for may_move in (True, False):
        try:
            logic = Logic(schema, ref_stands_alone)
            numbers = numbers_in(schema)
            result = _Rewriter(logic, ref_stands_alone, numbers, may_move).schema(schema)
        except (TypeError, AttributeError, ValueError, OverflowError, RecursionError):
            continue  # whoever checks it says what is wrong
        limit = max(MAX_CHARS, MAX_GROWTH * size(schema, inf))
        if size(result, limit) > limit:
            raise InvalidRequest(
                f"oneOf, not, if, propertyNames and unevaluated..., written out, take more than "
                f"{limit} characters; use a simpler schema"
            )
        places = {ref.partition("#")[2] for ref in refs_in(result)}
        if all((pointed_to(schema, p) is None) == (pointed_to(result, p) is None) for p in places):
            return result
    return schema


class _Rewriter:
    def __init__(
        self, logic: Logic, ref_stands_alone: bool, numbers: Iterable[float], may_move: bool
    ) -> None:
        self._logic = logic
        self._may_move = may_move
        self._ref_stands_alone = ref_stands_alone
        self._fractions_above = {floor(x) for x in numbers if abs(x) < 2**53 and x != floor(x)}

    def schema(self, schema: Schema) -> Schema:
        self._logic.step(1 + len(schema) // 16 if isinstance(schema, dict) else 1)
        if not isinstance(schema, dict):
            return schema
        node = dict(schema)
        if self._may_move and not (self._ref_stands_alone and "$ref" in node):
            added = [*self._unevaluated(node)]
            self._tidy(node)
            added += [*self._names(node), *self._dependencies(node)]
            added += [*self._logical(node), *self._one_of(node)]
            if added:
                node["allOf"] = [*node.get("allOf", ()), *added]
        self._part_bounds(node)
        for keyword, value in node.items():
            if keyword in OF_SCHEMAS_BY_NAME and isinstance(value, dict):
                node[keyword] = {name: self.schema(part) for name, part in value.items()}
            elif keyword in OF_SCHEMAS and isinstance(value, list):
                node[keyword] = [self.schema(part) for part in value]
            elif keyword in OF_SCHEMAS:
                node[keyword] = self.schema(value)
        return node

    def _tidy(self, node: dict[str, Any]) -> None:
        """Drops what says nothing, and writes counts as integers."""
        if node.get("uniqueItems") is False or node.get("maxItems", 2) in (0, 1):
            node.pop("uniqueItems", None)
        needs_none = node.get("minContains") == 0 and "maxContains" not in node
        is_old = self._ref_stands_alone  # and has no minContains
        if "contains" not in node or (needs_none and not is_old):
            for keyword in ("contains", "minContains", "maxContains"):
                node.pop(keyword, None)
        for keyword in _COUNTS:
            if isinstance(count := node.get(keyword), float) and count.is_integer():
                node[keyword] = int(count)

    def _part_bounds(self, node: dict[str, Any]) -> None:
        """Moves an exclusive bound by 1e-9 where another is less than one away from it: llguidance
        1.9.1 lets exclusiveMinimum=2 with maximum=2.5 be 2."""
        for keyword, sign in (("exclusiveMinimum", 1), ("exclusiveMaximum", -1)):
            bound = node.get(keyword)
            if bound is not None and bound - (sign < 0) in self._fractions_above:
                node[keyword] = bound + sign * max(1e-9, ulp(bound))

    def _logical(self, node: dict[str, Any]) -> Iterator[Schema]:
        if "if" not in node or not node.keys() & {"then", "else"}:
            for keyword in {"if", "then", "else"} & node.keys():
                del node[keyword]  # each is nothing without the others
        elif (otherwise := self._negation(node, "if")) is not None:
            holds = {"allOf": [node.pop("if"), node.pop("then", True)]}
            fails = {"allOf": [otherwise, node.pop("else", True)]}
            yield {"anyOf": [holds, fails]}
        if "not" in node and (negated := self._negation(node, "not")) is not None:
            del node["not"]
            yield negated

    def _negation(self, node: dict[str, Any], keyword: str) -> Schema | None:
        """The negation of a keyword's schema; None, too, where it leaves `node` nothing, as it may
        leave out too much."""
        negated = self._logic.negation(node[keyword])
        rest = {name: value for name, value in node.items() if name != keyword}
        leaves_some = negated is False or not self._logic.exclusive(rest, negated)
        return negated if leaves_some else None

    def _one_of(self, node: dict[str, Any]) -> Iterator[Schema]:
        """`oneOf` as `anyOf`, where each branch also refuses those that may hold with it. Stays
        where nothing would be left of a branch, as a negation may leave out too much."""
        branches = node.get("oneOf")
        if not isinstance(branches, list):
            return
        rivals: list[list[Schema]] = [[] for _ in branches]
        for i, j in combinations(range(len(branches)), 2):
            if not self._logic.exclusive(branches[i], branches[j]):
                rivals[i].append(branches[j])
                rivals[j].append(branches[i])
        rest = {keyword: value for keyword, value in node.items() if keyword != "oneOf"}
        alone = []
        for branch, others in zip(branches, rivals, strict=True):
            others = list(map(self._logic.negation, others))
            if None in others:
                return
            if others and self._logic.exclusive({"allOf": [rest, branch]}, {"allOf": others}):
                return
            alone.append({"allOf": [branch, *others]} if others else branch)
        del node["oneOf"]
        if "anyOf" in node:
            yield {"anyOf": alone}
        else:
            node["anyOf"] = alone

    def _dependencies(self, node: dict[str, Any]) -> Iterator[Schema]:
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name, needed in node.pop(keyword, {}).items():
                then = {"required": needed} if isinstance(needed, list) else needed
                yield {"anyOf": [{"properties": {name: False}}, then]}

    def _names(self, node: dict[str, Any]) -> Iterator[Schema]:
        if "propertyNames" not in node:
            return
        schema = node["propertyNames"]
        conjuncts = self._logic.conjuncts(schema) if isinstance(schema, dict) else []
        limits = [limit for part in conjuncts for limit in self._limits_of_names(part)]
        if schema is False:
            limits = [{"maxProperties": 0}]
        if None not in limits:
            del node["propertyNames"]
            yield from limits

    def _limits_of_names(self, schema: dict[str, Any]) -> Iterator[Schema | None]:
        """What one conjunct says of an object's names; None where it cannot be said so."""
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        for keyword, value in schema.items():
            if keyword == "pattern":
                yield {"patternProperties": {value: True}, "additionalProperties": False}
            elif keyword in ("const", "enum"):
                names = value if keyword == "enum" else [value]
                properties = {name: True for name in names if isinstance(name, str)}
                yield {"properties": properties, "additionalProperties": False}
            elif keyword == "$ref":
                yield from () if self._logic.resolved(value) is not None else (None,)
            elif keyword not in _OF_NAMES:
                yield None
        if "string" not in types_of([schema]):
            yield {"maxProperties": 0}
        if least % 1 or (most or 0) % 1:
            yield None
        elif least or most is not None:
            length = rf"^[\s\S]{{{int(least)},{'' if most is None else int(most)}}}$"
            yield {"patternProperties": {length: True}, "additionalProperties": False}

    def _unevaluated(self, node: dict[str, Any]) -> Iterator[Schema]:
        """What is evaluated must be known beforehand: through `allOf` and $ref."""
        wanted = {"unevaluatedProperties", "unevaluatedItems"} & node.keys()
        if not wanted:
            return
        parts = self._logic.conjuncts({k: v for k, v in node.items() if k not in wanted})
        ours = [part for part in parts if not part.keys() & _EVALUATED_SOMETIMES]
        is_known = len(ours) == len(parts) and not any(
            isinstance(part.get("items"), list)
            or ("$ref" in part and self._logic.resolved(part["$ref"]) is None)
            for part in parts
        )
        for keyword in sorted(wanted):
            rest = node[keyword]
            of_all = "additionalProperties" if keyword == "unevaluatedProperties" else "items"
            if rest is True or rest == {} or any(_evaluates_all(part, of_all) for part in parts):
                del node[keyword]
            elif is_known and of_all == "items":
                del node[keyword]
                first = [True] * max(len(part.get("prefixItems", ())) for part in parts)
                yield {"items": rest} | ({"prefixItems": first} if first else {})
            elif is_known:
                del node[keyword]
                kinds = ("properties", "patternProperties")
                seen = {k: {name: True for p in parts for name in p.get(k, ())} for k in kinds}
                yield seen | {"additionalProperties": rest}


def _evaluates_all(part: dict[str, Any], of_all: str) -> bool:
    unevaluated = "unevaluated" + of_all.removeprefix("additional").capitalize()
    return unevaluated in part or not isinstance(part.get(of_all, []), list)
