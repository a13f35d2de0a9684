"""The rows of a prompt set, checked before anything heavy is imported.

Prompts (manifest) --read--> lines --parse--> Row, or one problem a bad line
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from rlhf_api.data import Prompts
from rlhf_api.errors import FieldError

from rlhf_runtime.errors import InputError

MAX_PROBLEMS = 10
"""Problems told at once; more of the same kind tell a reader nothing new."""

RESERVED = frozenset({"prompts", "responses"})
"""Column names that would collide with a reward function's own parameters."""


@dataclass(frozen=True)
class Row:
    """One row of a prompt set."""

    where: str
    """Where a person finds it: `train.jsonl:7` or `data.prompts.inline[2]`."""
    text: str
    """The prompt."""
    columns: dict[str, Any]
    """The row's other fields."""


def load_rows(prompts: Prompts, path: str = "data.prompts") -> list[Row]:
    """Read every row of a prompt set.

    Args:
        prompts: the source; each row needs a text that is not empty in its `field`.
        path: its place in the manifest.

    Raises:
        InputError: with up to ten problems at once, each with its file and line or its place in the manifest.
    """
    rows: list[Row] = []
    problems: list[FieldError] = []
    for where, value in _values(prompts, path):
        outcome = value if isinstance(value, FieldError) else _row(where, value, prompts.field, path)
        (problems if isinstance(outcome, FieldError) else rows).append(outcome)
    raise_problems(problems)
    if not rows:
        raise_problems([FieldError(str(prompts.path), "no rows", "at least one prompt", "add prompts")])
    return rows


def raise_problems(problems: list[FieldError]) -> None:
    """Raise InputError with the first `MAX_PROBLEMS` problems and the count of the others; without any, do nothing."""
    if not problems:
        return
    lines = [str(problem) for problem in problems[:MAX_PROBLEMS]]
    if len(problems) > MAX_PROBLEMS:
        lines.append(f"and {len(problems) - MAX_PROBLEMS} more problems")
    raise InputError("\n".join(lines))


def _values(prompts: Prompts, path: str) -> Iterator[tuple[str, Any]]:
    """Each row's place and its parsed value, or the problem that kept it from being parsed."""
    if prompts.inline is not None:
        for index, item in enumerate(prompts.inline):
            yield f"{path}.inline[{index}]", {prompts.field: item} if isinstance(item, str) else item
    elif prompts.builtin is not None:
        name = f"{prompts.builtin}.jsonl"
        yield from _parse_lines(name, resources.files("rlhf_runtime.builtin").joinpath(name).read_bytes())
    else:
        yield from _parse_lines(str(prompts.path), _read(Path(str(prompts.path)), path))


def _read(file: Path, path: str) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        got = f"{file} ({error.strerror})"
        fix = "correct the path, or mount the volume that holds it"
        raise InputError(str(FieldError(f"{path}.path", got, "a JSONL file that can be read", fix))) from error


def _parse_lines(source: str, content: bytes) -> Iterator[tuple[str, Any]]:
    """JSON values of a JSONL file. Split at newlines alone: JSON strings may hold other line separators unescaped."""
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        where = f"{source}:{number}"
        if not line.strip():
            continue
        try:
            value = json.loads(line.decode())
            json.dumps(value, ensure_ascii=False).encode()  # an escape can write half of a surrogate pair
            yield where, value
        except UnicodeEncodeError:
            fix = "remove the escape between \\ud800 and \\udfff, or give its other half"
            yield where, FieldError(where, "half a character", "text that UTF-8 can hold", fix)
        except UnicodeDecodeError as error:
            got = f"a byte that is not UTF-8 at column {error.start + 1}"
            yield where, FieldError(where, got, "UTF-8 text", "save the file as UTF-8")
        except (ValueError, RecursionError) as error:
            detail = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
            yield where, FieldError(where, f"malformed JSON ({detail})", "one JSON object", "correct the line")


def _row(where: str, value: Any, field: str, path: str) -> Row | FieldError:
    if not isinstance(value, dict):
        return FieldError(where, _kind(value), "a JSON object", f'write {{"{field}": "..."}}')
    if field not in value:
        present = ", ".join(f"`{name}`" for name in value) or "no fields"
        fix = f"add it, or name the field that holds the prompt in {path}.field"
        return FieldError(where, f"only {present}" if value else present, f"a field `{field}`", fix)
    text = value[field]
    if not isinstance(text, str) or not text:
        got = _kind(text) if text != "" else "an empty text"
        return FieldError(f"{where}: {field}", got, "a text that is not empty", "write the prompt there")
    columns = {name: item for name, item in value.items() if name != field}
    if taken := sorted(RESERVED & columns.keys()):
        fix = "rename it: reward functions get the prompts and responses under these names"
        return FieldError(where, f"a field `{taken[0]}`", "another name", fix)
    return Row(where, text, columns)


def _kind(value: Any) -> str:
    """What a JSON value is, in words."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a text"
        case list():
            return "a list"
        case _:
            return "an object"
