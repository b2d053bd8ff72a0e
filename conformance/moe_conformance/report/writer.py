"""The files of a report, each written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from moe_conformance.report.junit import junit_xml
from moe_conformance.report.model import Report

JSON_NAME = "report.json"
JUNIT_NAME = "junit.xml"


class ReportFolderError(OSError):
    """The folder cannot be written to; the message is one line for the user."""


def prepare_folder(folder: Path) -> None:
    """Creates the folder and writes a file there, so that a long run does not end without its report.

    Raises:
        ReportFolderError: it cannot be created or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ReportFolderError(f"cannot write to the report folder {folder}: {error.strerror or error}") from error


def write_report(report: Report, folder: Path) -> None:
    """Writes ``report.json`` and ``junit.xml``; raises ReportFolderError."""
    prepare_folder(folder)
    write_whole(folder / JSON_NAME, report.model_dump_json(indent=1).encode() + b"\n")
    write_whole(folder / JUNIT_NAME, junit_xml(report))


def write_whole(path: Path, content: bytes) -> None:
    """A reader, or a run that is killed now, sees the old file or the new one, never a part.

    Raises:
        ReportFolderError: it cannot be written.
    """
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ReportFolderError(f"cannot write {path}: {error.strerror or error}") from error


def _umask() -> int:
    """The process's umask: mkstemp makes files that only their owner may read, which a CI server often is not."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
