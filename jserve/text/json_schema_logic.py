"""Says when no value fits two JSON schemas, and what fits where one does not. Knows the keywords'
meaning (drafts 6 to 2020-12): nothing of grammars, nor which schemas are supported.

Both answers are safe, not complete: what is called exclusive is, and every value of a negation is
refused by the schema, but some others may be, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jserve.errors import InvalidRequest
from jserve.text.json_parts import key_of, parts_of, pointed_to, type_of
from jserve.text.json_schema_keywords import ANNOTATIONS, KNOWN, REWRITTEN

Schema = Any  # a dict of keywords, true or false
TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
MAX_STEPS = 100_000  # at most half a second; a oneOf of 110 models, each told by a constant
MAX_REFS = 8  # within each other
EXACT_BELOW = 2**53  # above, the compiler of grammars takes neighbouring numbers for one
# keyword -> the type that it limits, its opposite, and what to add to a count
_ALL = KNOWN | REWRITTEN
_LONG = (list, dict)
_FORMS = {
    **dict.fromkeys(("required", "enum", "allOf", "anyOf", "oneOf"), list),
    **dict.fromkeys(("properties", "patternProperties"), dict),
}
_OPPOSITES = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
}
# a type, and what bounds it from below and above: keyword -> 1 or -1 where the bound does not fit
_RANGES = (
    ("number", {"minimum": 0, "exclusiveMinimum": 1}, {"maximum": 0, "exclusiveMaximum": -1}),
    ("string", {"minLength": 0}, {"maxLength": 0}),
    ("array", {"minItems": 0}, {"maxItems": 0}),
)


class Logic:
    """Reasons about the parts of one schema, `root`.

    Args:
      ref_stands_alone: the keywords beside a $ref do not count (before draft 2019-09).

    Raises (all methods):
      InvalidRequest: the schema needs more than `MAX_STEPS` of them.
      TypeError: a keyword's value is none that the specification allows.
    """

    def __init__(self, root: Schema, ref_stands_alone: bool) -> None:
        self._root = root
        self._ref_stands_alone = ref_stands_alone
        self._num_steps = 0
        self._in_negation: list[str] = []
        # Below an $id of its own, a $ref means something else.
        self._resolves = not any(
            isinstance(part, dict) and "$id" in part and part is not root for part in parts_of(root)
        )

    def exclusive(self, a: Schema, b: Schema, depth: int = 8) -> bool:
        """Whether it is sure that no value fits both."""
        self.step()
        if a is False or b is False:
            return True
        if depth == 0 or not isinstance(a, dict) or not isinstance(b, dict):
            return False
        left, right = self.conjuncts(a), self.conjuncts(b)
        types = types_of(left) & types_of(right) - _out_of_range(left + right)
        if not types or self._values_exclude(left, right):
            return True
        if types == {"object"}:
            for name in {name for node in left + right for name in node.get("required", ())}:
                self.step((len(left) + len(right)) // 8)
                mine, theirs = _of_property(left, name), _of_property(right, name)
                if any(self.exclusive(x, y, depth - 1) for x in mine for y in theirs):
                    return True
        return any(
            all(self.exclusive(branch, other, depth - 1) for branch in node[keyword])
            for nodes, other in ((left, b), (right, a))
            for node in nodes
            for keyword in ("anyOf", "oneOf")
            if isinstance(node.get(keyword), list)
        )

    def _values_exclude(self, left: list[dict], right: list[dict]) -> bool:
        """Whether both list their values, or one does and the other's types are none of theirs."""
        mine, theirs = _values(left), _values(right)
        self.step(sum(1 for _ in parts_of([mine, theirs])) // 4)
        if mine is not None and theirs is not None:
            return set(map(key_of, mine)).isdisjoint(map(key_of, theirs))
        values, types = (mine, types_of(right)) if theirs is None else (theirs, types_of(left))
        return values is not None and types.isdisjoint(map(type_of, values))

    def negation(self, schema: Schema) -> Schema | None:
        """A schema whose every value `schema` refuses; None where none can be written, or where a
        keyword is unknown."""
        self.step()
        if isinstance(schema, bool):
            return not schema
        if not isinstance(schema, dict) or not schema.keys() <= _ALL:
            return None
        self._check_forms(schema)
        if self._ref_stands_alone and "$ref" in schema:
            schema = {"$ref": schema["$ref"]}
        options = [
            option
            for keyword, value in schema.items()
            for option in self._negations(keyword, value)
            if option is not None and option is not False
        ]
        self.step(len(options))
        if not options:
            return False if schema.keys() <= ANNOTATIONS else None
        return options[0] if len(options) == 1 else {"anyOf": options}

    def _negations(self, keyword: str, value: Any) -> Iterator[Schema | None]:
        """Ways in which a value can fail one keyword."""
        if keyword == "$ref":
            yield self._negated_ref(value)
        elif keyword == "not":
            yield value
        elif keyword == "allOf":
            yield from map(self.negation, value)
        elif keyword == "anyOf":
            parts = [self.negation(part) for part in value]
            yield None if None in parts else {"allOf": parts}
        elif keyword == "type":
            refused = TYPES - types_of([{"type": value}])
            yield {"type": sorted(refused)} if refused else None
        elif keyword in ("const", "enum"):
            values = [value] if keyword == "const" else value
            self.step(len(values) + sum(len(text) for text in values if isinstance(text, str)))
            yield from _other_than(values)
        elif keyword == "required":
            for name in value:
                yield {"type": "object", "properties": {name: False}}
        elif keyword == "properties":
            for name, part in value.items():
                negated = self.negation(part)
                if negated is not None and negated is not False:
                    yield {"type": "object", "required": [name], "properties": {name: negated}}
        elif keyword in _OPPOSITES:
            type, opposite, added = _OPPOSITES[keyword]
            if abs(value) < EXACT_BELOW if type == "number" else value + added >= 0:
                yield {"type": type, opposite: value + added}

    def _negated_ref(self, ref: Any) -> Schema | None:
        target = self.resolved(ref)
        if target is None or len(self._in_negation) > MAX_REFS or ref in self._in_negation:
            return None
        self._in_negation.append(ref)
        negated = self.negation(target)
        self._in_negation.pop()
        return negated

    def conjuncts(self, schema: dict[str, Any]) -> list[dict[str, Any]]:
        """The parts that all hold where `schema` does, through $ref and allOf; {enum: []} where one
        is false."""
        found: list[dict[str, Any]] = []
        waiting: list[Schema] = [schema]
        seen: set[int] = set()
        while waiting:
            node = waiting.pop()
            self.step()
            if node is False:
                found.append({"enum": []})
            if not isinstance(node, dict) or id(node) in seen:
                continue
            seen.add(id(node))
            self._check_forms(node)
            if "$ref" in node:
                waiting.append(self.resolved(node["$ref"]))
                if self._ref_stands_alone:
                    node = {"$ref": node["$ref"]}
            found.append(node)
            waiting += node.get("allOf", ())
        return found

    def resolved(self, ref: Any) -> Schema | None:
        """What a $ref within the schema names (RFC 6901); None where it names nothing known."""
        if not self._resolves or not isinstance(ref, str) or not ref.startswith("#"):
            return None
        self.step(len(ref) // 32)
        return pointed_to(self._root, ref[1:])

    def _check_forms(self, node: dict[str, Any]) -> None:
        """Checks what is iterated over, and counts it: a node is met once for each $ref to it."""
        self.step((len(node) + sum(len(v) for v in node.values() if isinstance(v, _LONG))) // 16)
        for keyword, value in node.items():
            if not isinstance(value, _FORMS.get(keyword, object)) or (
                keyword in _OPPOSITES and type_of(value) != "number"
            ):
                raise TypeError(f"{keyword} is {type(value).__name__}")
        if not all(isinstance(name, str) for name in node.get("required", ())):
            raise TypeError("required holds no names")

    def step(self, number: int = 1) -> None:
        """Counts work, which some schemas make grow exponentially."""
        self._num_steps += number
        if self._num_steps > MAX_STEPS:
            raise InvalidRequest(
                f"oneOf, not, if, propertyNames and unevaluated... need more than {MAX_STEPS} "
                f"steps; use a simpler schema"
            )


def types_of(nodes: Iterable[dict[str, Any]]) -> set[str]:
    """Types that all of the nodes take; an integer is a number."""
    types = set(TYPES)
    for node in nodes:
        if "type" in node:
            named = node["type"] if isinstance(node["type"], list) else [node["type"]]
            allowed = {"number" if name == "integer" else name for name in named}
            if not allowed <= TYPES:
                raise TypeError(f"type is {named}")
            types &= allowed
    return types


def _out_of_range(nodes: Sequence[dict[str, Any]]) -> set[str]:
    """Types of which no value is within all bounds."""
    found = set()
    for type, below, above in _RANGES:
        low, high = (
            [
                (node[name], shift)
                for node in nodes
                for name, shift in bounds.items()
                if name in node
            ]
            for bounds in (below, above)
        )
        if low and high and max(low) > min(high):
            found.add(type)
    return found


def _values(nodes: Iterable[dict[str, Any]]) -> list[Any] | None:
    """A list which holds the value where the nodes hold, or None."""
    for node in nodes:
        if "const" in node:
            return [node["const"]]
        if isinstance(node.get("enum"), list):
            return node["enum"]
    return None


def _of_property(nodes: Iterable[dict[str, Any]], name: str) -> list[Schema]:
    """Schemas that a property has to fit."""
    found: list[Schema] = []
    for node in nodes:
        if name in node.get("properties", {}):
            found.append(node["properties"][name])
        elif not node.get("patternProperties"):
            found.append(node.get("additionalProperties", True))
    return found or [True]


def _other_than(values: Sequence[Any]) -> Iterator[Schema]:
    """Values that are none of `values`, type by type; no lists and objects where one is listed.
    Nothing where llguidance 1.9.1 would let a listed one be: it reads [^x] as if JSON's quote and
    backslash were always in it, and numbers as doubles."""
    types = set(map(type_of, values))
    texts = [value for value in values if isinstance(value, str)]
    numbers = sorted({v for v in values if type_of(v) == "number"})
    if any(set(text) & {'"', "\\"} for text in texts) or any(
        abs(number) >= EXACT_BELOW for number in numbers
    ):
        return
    if others := sorted(TYPES - types):
        yield {"type": others}
    if "boolean" in types:
        yield {"enum": [b for b in (True, False) if not any(b is value for value in values)]}
    if texts:
        yield {"type": "string", "pattern": f"^{_other_text(texts)}$"}
    for low, high in zip([None, *numbers], [*numbers, None], strict=True):
        bounds = {"exclusiveMinimum": low, "exclusiveMaximum": high}
        if numbers:
            yield {"type": "number"} | {k: v for k, v in bounds.items() if v is not None}


def _other_text(texts: Iterable[str]) -> str:
    r"""A regular expression of every text but these: a -> (?:|[^a][\s\S]*|a(?:[\s\S]+))"""
    tails: dict[str, list[str]] = {}
    for text in texts:
        tails.setdefault(text[:1], []).append(text[1:])
    options = [] if tails.pop("", None) else [""]
    heads = {
        head if head.isalnum() else rf"\x{{{ord(head):X}}}": rest
        for head, rest in sorted(tails.items())
    }
    options.append(rf"[^{''.join(heads)}][\s\S]*" if heads else r"[\s\S]+")
    options += [head + _other_text(rest) for head, rest in heads.items()]
    return f"(?:{'|'.join(options)})"
