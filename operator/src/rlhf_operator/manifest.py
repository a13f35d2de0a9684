"""Reads a manifest file."""

from pathlib import Path
from typing import Any

from rlhf_api import FieldError, RLHFJob, SpecError
from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError


def read_manifest(file: Path) -> RLHFJob:
    """The job in a file of YAML 1.2, in which `1e-6` is a number as it is for the API server.

    Raises:
        SpecError: when the file cannot be read, is not one YAML document, repeats a key, or does not hold an RLHFJob.
    """
    return RLHFJob.parse(_document(file))


def _document(file: Path) -> Any:
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        got = f"no readable file ({error.strerror})"
        raise _problem(str(file), got, "a YAML file", "correct the name") from None
    except UnicodeDecodeError as error:
        raise _problem(
            str(file), f"a byte that is not UTF-8 at {error.start}", "YAML text", "save it as UTF-8"
        ) from None
    documents = _load(file, text)
    if not documents or documents == [None]:
        raise _problem(str(file), "an empty file", "one RLHFJob", "write a manifest, or copy one from examples/")
    if len(documents) > 1:
        raise _problem(str(file), f"{len(documents)} documents", "one RLHFJob", "give each job a file of its own")
    return documents[0]


def _load(file: Path, text: str) -> list[Any]:
    try:
        return list(YAML(typ="safe", pure=True).load_all(text))
    except DuplicateKeyError as error:
        got = (error.problem or "a duplicate key").removeprefix("found ").split(" with value ")[0]
        raise _problem(_place(file, error), got, "each key once", "remove one of the two") from None
    except MarkedYAMLError as error:
        got = "; ".join(part for part in (error.context, error.problem) if part) or "broken YAML"
        raise _problem(_place(file, error), got, "YAML", "correct the syntax there") from None
    except (YAMLError, ValueError, RecursionError) as error:
        got = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise _problem(str(file), got, "YAML", "correct the syntax") from None


def _place(file: Path, error: MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    return f"{file}:{mark.line + 1}" if mark else str(file)


def _problem(path: str, got: str, expected: str, fix: str) -> SpecError:
    return SpecError([FieldError(path, got, expected, fix)])
