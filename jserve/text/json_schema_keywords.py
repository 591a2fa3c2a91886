"""The keywords of JSON Schema (drafts 6 to 2020-12), by what their values are and what becomes of
them here. Knows their names only."""

from __future__ import annotations

OF_SCHEMAS_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions"})
OF_SCHEMAS = frozenset(
    {"anyOf", "oneOf", "allOf", "prefixItems", "items", "additionalItems", "additionalProperties"}
)
OF_VALUES = frozenset(
    {
        *("$ref", "const", "enum", "type", "format", "pattern", "required"),
        *("minItems", "maxItems", "minProperties", "maxProperties", "minLength", "maxLength"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    }
)
ANNOTATIONS = frozenset(
    {
        *("$schema", "$id", "$anchor", "$comment", "title", "description", "default", "examples"),
        *("readOnly", "writeOnly", "deprecated", "contentMediaType", "contentEncoding"),
        "discriminator",  # OpenAPI: a hint which branch of oneOf applies
    }
)
# Written in the others by `json_schema_rewrites`, where that can be done.
REWRITTEN = frozenset(
    {
        *("if", "then", "else", "not", "contains", "minContains", "maxContains", "uniqueItems"),
        *("dependentRequired", "dependentSchemas", "dependencies", "propertyNames"),
        *("unevaluatedProperties", "unevaluatedItems"),
    }
)
KNOWN = OF_SCHEMAS_BY_NAME | OF_SCHEMAS | OF_VALUES | ANNOTATIONS
LATEST_DRAFT = "https://json-schema.org/draft/2020-12/schema"
DRAFTS = frozenset(
    {
        *(LATEST_DRAFT, "https://json-schema.org/draft/2019-09/schema"),
        *("http://json-schema.org/draft-07/schema", "http://json-schema.org/draft-06/schema"),
    }
)
