"""Writes tests/data/text/json_schema_suite.json: the schemas of JSON-Schema-Test-Suite, with values
that fit each and values that do not.

Not part of any test run. The suite comes with the source distribution of jsonschema:

  pip download --no-deps --no-binary=:all: jsonschema==4.26.0
  python scripts/make_json_schema_suite.py jsonschema-4.26.0.tar.gz tests/data/text
"""

from __future__ import annotations

import json
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DRAFTS = {  # folder -> what its $schema holds
    "draft2020-12": "json-schema.org/draft/2020-12/schema",
    "draft2019-09": "json-schema.org/draft/2019-09/schema",
    "draft7": "json-schema.org/draft-07/schema",
    "draft6": "json-schema.org/draft-06/schema",
}
SOURCE = (
    "JSON-Schema-Test-Suite, as in json/tests of {name} on PyPI: each object schema of four drafts "
    "once, as [description, drafts that have it, schema, values that fit, values that do not]"
)


def cases_of(files: dict[str, bytes], draft: str) -> Iterator[tuple[str, dict, list, list]]:
    """(description, schema, valid values, invalid values) of each case of one draft."""
    for path in sorted(path for path in files if f"/json/tests/{draft}/" in path):
        for case in json.loads(files[path]):
            schema, values = case["schema"], ([], [])
            if not isinstance(schema, dict):
                continue
            if DRAFTS[draft] in schema.get("$schema", ""):
                schema = {key: value for key, value in schema.items() if key != "$schema"}
            for test in case["tests"]:
                values[not test["valid"]].append(test["data"])
            yield f"{Path(path).stem}: {case['description']}", schema, *values


def main(archive: str, folder: str) -> None:
    with tarfile.open(archive) as tar:
        members = [member for member in tar if "/json/" in member.name and member.isfile()]
        files = {member.name: tar.extractfile(member).read() for member in members}
    found: dict[str, list[Any]] = {}
    for draft in DRAFTS:
        for description, *case in cases_of(files, draft):
            entry = found.setdefault(json.dumps(case), [description, [], *case])
            entry[1].append(draft)
    licence = next(data for path, data in files.items() if path.endswith("/json/LICENSE"))
    suite = {
        "source": SOURCE.format(name=Path(archive).name),
        "licence": licence.decode().splitlines(),
        "schemas": list(found.values()),
    }
    (Path(folder) / "json_schema_suite.json").write_text(json.dumps(suite) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
