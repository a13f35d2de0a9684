"""Reads a manifest file, each scalar as the API server reads it."""

import re
from pathlib import Path
from typing import Any

from rlhf_api import FieldError, RLHFJob, SpecError
from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError, SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import ScalarNode

_INT, _BOOL, _TIMESTAMP = (f"tag:yaml.org,2002:{name}" for name in ("int", "bool", "timestamp"))
_WORDS = re.compile("^(y|Y|yes|Yes|YES|on|On|ON|n|N|no|No|NO|off|Off|OFF)$")
_OCTAL = re.compile("[-+]?0[0-7]+")


def read_manifest(file: Path) -> RLHFJob:
    """The job in a file of YAML as Kubernetes has it: `1e-6` is a number, `yes` is true, `010` is 8, a date is a text.

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
        return list(_yaml().load_all(text))
    except DuplicateKeyError as error:
        got = (error.problem or "a duplicate key").removeprefix("found ").split(" with value ")[0]
        raise _problem(_place(file, error), got, "each key once", "remove one of the two") from None
    except MarkedYAMLError as error:
        got = "; ".join(part for part in (error.context, error.problem) if part) or "broken YAML"
        raise _problem(_place(file, error), got, "YAML", "correct the syntax there") from None
    except (YAMLError, ValueError, RecursionError) as error:
        got = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise _problem(str(file), got, "YAML", "correct the syntax") from None


class _Constructor(SafeConstructor):
    """Makes values of scalars."""

    def whole(self, node: ScalarNode) -> int:
        """A whole number; in base 8 where it begins with 0, as in YAML 1.1."""
        digits = node.value.replace("_", "")
        return int(digits, 8) if _OCTAL.fullmatch(digits) else int(self.construct_yaml_int(node))


_Constructor.add_constructor(_INT, _Constructor.whole)


def _yaml() -> YAML:
    """A reader of YAML 1.2 with those parts of 1.1 that Kubernetes keeps, and without dates."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor = _Constructor
    for rules in yaml.resolver.versioned_resolver.values():
        rules[:] = [rule for rule in rules if rule[0] != _TIMESTAMP]
    yaml.resolver.add_version_implicit_resolver(yaml.resolver.processing_version, _BOOL, _WORDS, list("yYnNoO"))
    return yaml


def _place(file: Path, error: MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    return f"{file}:{mark.line + 1}" if mark else str(file)


def _problem(path: str, got: str, expected: str, fix: str) -> SpecError:
    return SpecError([FieldError(path, got, expected, fix)])
