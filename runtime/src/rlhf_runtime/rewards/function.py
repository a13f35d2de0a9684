"""Reward functions: found by name or import path, called once a batch, their results checked."""

import difflib
import importlib
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rlhf_api.errors import FieldError
from rlhf_api.rewards import Reward

from rlhf_runtime.errors import InputError, RewardError
from rlhf_runtime.rewards.rules import RULES

Function = Callable[..., Any]
"""`f(prompts, responses, **columns)`: lists of equal length in, as many numbers out."""

_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class RewardTerm:
    """One term of the reward, ready to be called."""

    name: str
    """Its name in metrics."""
    weight: float
    """Its factor in the total."""
    label: str
    """The function as the manifest names it."""
    function: Function
    """What computes it."""

    def score(
        self, prompts: Sequence[str], responses: Sequence[str], columns: Sequence[Mapping[str, Any]]
    ) -> np.ndarray:
        """Unweighted scores [B] float32 of B responses, in their order.

        Args:
            prompts: B prompts.
            responses: B responses.
            columns: the other fields of each one's data row; a field that a row lacks is given as None.

        Raises:
            RewardError: when the function raises, or does not return one finite number a response.
        """
        names = dict.fromkeys(name for row in columns for name in row)
        fields = {name: [row.get(name) for row in columns] for name in names}
        try:
            result = self.function(list(prompts), list(responses), **fields)
        except (Exception, SystemExit) as error:
            got = f"{_describe(error)} {_place(error, self.function)}"
            raise self._error(got, "a list of numbers", "correct the function") from error
        return self._checked(result, responses)

    def _checked(self, result: object, responses: Sequence[str]) -> np.ndarray:
        values = result.tolist() if hasattr(result, "tolist") else result  # numpy arrays and torch tensors
        if not isinstance(values, list | tuple):
            fix = "return one number a response"
            raise self._error(f"{type(result).__name__}", f"a list of {len(responses)} numbers", fix)
        if len(values) != len(responses):
            fix = "return one number a response"
            raise self._error(f"{len(values)} scores", f"{len(responses)}, one a response", fix)
        scores = [_number(value) for value in values]
        for index, score in enumerate(scores):
            if score is None:
                got = f"{_short(values[index])} for response {index} ({_short(responses[index])})"
                raise self._error(got, "a finite number", "return a number that float32 can hold")
        return np.array(scores, dtype=np.float32)

    def _error(self, got: str, expected: str, fix: str) -> RewardError:
        return RewardError(str(FieldError(f"rewards.{self.name} ({self.label})", got, expected, fix)))


def extend_path(folders: Sequence[str]) -> None:
    """Put folders first on the path of this process, in their order."""
    sys.path[:] = [*folders, *(folder for folder in sys.path if folder not in folders)]
    importlib.invalidate_caches()


def resolve(reward: Reward) -> RewardTerm:
    """Find a term's function, importing it where it is the user's own.

    Raises:
        InputError: when there is no such module or attribute, its import fails, or it cannot be called.
    """
    assert reward.function is not None, "a term without a function"
    if reward.function.name is not None:
        function = RULES.get(reward.function.name)
        if function is None:
            raise _input_error(
                reward, "name", repr(reward.function.name), f"one of {', '.join(RULES)}", "use one of them"
            )
        return RewardTerm(reward.name, reward.weight, reward.function.name, function)
    import_path = str(reward.function.import_path)
    return RewardTerm(reward.name, reward.weight, import_path, _imported(reward, import_path))


def column_problems(
    reward: Reward, term: RewardTerm, rows: Sequence[Mapping[str, Any]], source: str
) -> list[FieldError]:
    """Whether the function can be called with the columns of these rows.

    A user's own function is given None where a row lacks a column that others have; a shipped rule needs it in each.

    Args:
        reward: the term as the manifest has it.
        term: the same, resolved.
        rows: columns of all rows.
        source: where they come from, in the words of the manifest.
    """
    assert reward.function is not None, "a term without a function"
    present = dict.fromkeys(name for row in rows for name in row)
    path = _path(reward, "name" if reward.function.name else "importPath")
    try:
        inspect.signature(term.function).bind([], [], **present)
    except TypeError as error:
        got = f"a function that cannot be called with the columns of {source} ({error})"
        expected = f"f(prompts, responses, {', '.join(present) + ', ' if present else ''}**columns)"
        return [FieldError(path, got, expected, "change its parameters, or add the column to the data")]
    except ValueError:  # a builtin without a signature
        return []
    if reward.function.name is None:
        return []
    parameters = inspect.signature(term.function).parameters.values()
    for name in [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]:
        lacking = [index for index, row in enumerate(rows) if row.get(name) is None]
        if lacking:
            got = f"{len(lacking)} rows without `{name}`, the first of them row {lacking[0] + 1} of {source}"
            return [FieldError(path, got, f"`{name}` in each row", f"add `{name}` to them")]
    return []


def _imported(reward: Reward, import_path: str) -> Function:
    module_name, _, attribute = import_path.partition(":")
    module = _module(reward, module_name)
    try:
        function = getattr(module, attribute)
    except AttributeError:
        near = difflib.get_close_matches(attribute, vars(module), n=1)
        fix = f"did you mean `{module_name}:{near[0]}`?" if near else f"define it in {_file_of(module)}"
        raise _input_error(reward, "importPath", import_path, f"`{attribute}` in {module_name}", fix) from None
    if not callable(function):
        got = f"{import_path}, a {type(function).__name__}"
        raise _input_error(reward, "importPath", got, "a function", "name a function of that module")
    return function


def _module(reward: Reward, name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            got = f"{name}, which imports `{error.name}`, which is not installed {_place(error)}"
            raise _input_error(reward, "importPath", got, "a module that imports", "install it in the image") from error
        got = f"{name}, but there is no module {error.name}"
        fix = f"put it in a folder named by `code`, or correct the name (looked in {', '.join(sys.path[:3])} ...)"
        raise _input_error(reward, "importPath", got, "a module on the path", fix) from None
    except SyntaxError as error:
        got = f"{name}, which is not Python: {error.msg} at {error.filename}:{error.lineno}"
        raise _input_error(reward, "importPath", got, "a module that imports", "correct the line") from None
    except (Exception, SystemExit) as error:
        got = f"{name}, whose import raises {_describe(error)} {_place(error)}"
        raise _input_error(reward, "importPath", got, "a module that imports", "correct the module") from error


def _path(reward: Reward, field: str) -> str:
    return f"rewards.{reward.name}.function.{field}"


def _input_error(reward: Reward, field: str, got: str, expected: str, fix: str) -> InputError:
    return InputError(str(FieldError(_path(reward, field), got, expected, fix)))


def _number(value: object) -> float | None:
    """A finite number that float32 holds, or None."""
    if hasattr(value, "item"):  # a numpy or torch scalar
        try:
            value = value.item()
        except (RuntimeError, ValueError):
            return None
    if not isinstance(value, int | float) or not -_LARGEST <= value <= _LARGEST:  # a NaN compares as false
        return None
    return float(value)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _place(error: BaseException, function: Function | None = None) -> str:
    """`at FILE:LINE in NAME`: the innermost frame of the user's own code, else where the function is defined."""
    frames = traceback.extract_tb(error.__traceback__)
    foreign = (*(sysconfig.get_path(kind) for kind in ("stdlib", "purelib")), str(Path(__file__).parents[1]), "<frozen")
    own = [frame for frame in frames if not frame.filename.startswith(foreign)]
    if not own and (code := getattr(function, "__code__", None)):
        return f"at {code.co_filename}:{code.co_firstlineno} in {code.co_name}"
    frame = (own or list(frames))[-1]
    return f"at {frame.filename}:{frame.lineno} in {frame.name}"


def _file_of(module: Any) -> str:
    return getattr(module, "__file__", None) or module.__name__


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
