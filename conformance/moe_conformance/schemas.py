"""The files that the commands write, for programs: JSON Schemas of them, and reading one back with a clear refusal.

``python -m moe_conformance.schemas FOLDER`` writes the schemas.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from moe_conformance.bench.model import BenchResult
from moe_conformance.report.model import Report

FILES: dict[str, type[BaseModel]] = {"bench.schema.json": BenchResult, "report.schema.json": Report}
"""Name of each schema's file, and the model that it describes: ``bench --json`` and ``run --report``."""
Model = TypeVar("Model", bound=BaseModel)


def schema_text(model: type[BaseModel]) -> str:
    """The JSON Schema of what is written, defaults included; the same model gives the same bytes."""
    return json.dumps(model.model_json_schema(mode="serialization"), indent=1, sort_keys=True) + "\n"


def read_file(model: type[Model], path: Path, writer: str) -> Model:
    """What a file holds; ``writer``: the command that writes such files.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such file, or of a version that is not known here; one line.
    """
    text = path.read_text(encoding="utf-8")
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        raise ValueError(f"{path} {_refusal(model, text, error)}; expected a file that {writer} wrote") from error


def _refusal(model: type[BaseModel], text: str, error: ValidationError) -> str:
    first = error.errors()[0]
    if first["type"] != "json_invalid":
        given, known = json.loads(text), model.model_fields["schema_version"].default
        if isinstance(given, dict) and (version := given.get("schema_version", known)) != known:
            return f"has schema_version {version!r}, and this version of the suite reads {known}"
    place = ".".join(map(str, first["loc"])) or "the file"
    return f"is not of the known form: {place}: {first['msg']}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the schemas into the folder given; 2 with one line where there is none."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if len(given) != 1 or not Path(given[0]).is_dir():
        print("usage: python -m moe_conformance.schemas FOLDER, a folder that exists", file=sys.stderr)
        return 2
    for name, model in FILES.items():
        (Path(given[0]) / name).write_text(schema_text(model), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
