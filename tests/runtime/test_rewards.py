import importlib
import random
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rlhf_api.rewards import Reward, RewardFunction
from rlhf_runtime.errors import InputError, RewardError
from rlhf_runtime.protocol import DataProto
from rlhf_runtime.rewards.function import RewardTerm, extend_path, resolve
from rlhf_runtime.rewards.rules import RULES, digit_share, exact_match
from rlhf_runtime.single_controller.decorator import MODES, registered_methods
from rlhf_runtime.workers.reward import RewardWorker


@pytest.fixture
def module(tmp_path, monkeypatch, request):
    """Writes a module of the user's and puts its folder on the path; returns its name and file."""
    monkeypatch.setattr("sys.path", list(sys.path))
    count = iter(range(100))

    def write(source: str) -> tuple[str, str]:
        name = f"user_{abs(hash(request.node.name))}_{next(count)}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        extend_path([str(tmp_path)])
        return name, str(tmp_path / f"{name}.py")

    return write


def own(import_path: str, name: str = "mine") -> Reward:
    return Reward(name=name, function=RewardFunction(import_path=import_path))


def term(function, name: str = "mine", weight: float = 1.0) -> RewardTerm:
    return RewardTerm(name, weight, "mod:f", function)


def refusal(import_path: str) -> str:
    with pytest.raises(InputError) as caught:
        resolve(own(import_path))
    message = str(caught.value)
    assert message.startswith("rewards.mine.function.importPath: got ")
    assert ". Fix: " in message
    return message


def test_digit_share():
    assert digit_share(["p"] * 4, ["12", "a1", "", "\u0662\u00b2x1"]) == [1.0, 0.5, 0.0, 0.25]


def test_exact_match_looks_past_white_space_and_at_numbers():
    assert exact_match(["p"] * 4, [" 12\n", "12.", "", "12"], answer=["12", "12", "12", 12], level=[1] * 4) == [
        1,
        0,
        0,
        1,
    ]


@pytest.mark.parametrize("name", RULES)
def test_shipped_rules_are_found_by_name(name):
    assert resolve(Reward(name="r", function=RewardFunction(name=name))).function is RULES[name]


def test_a_name_that_is_not_shipped_is_refused():
    with pytest.raises(InputError, match=r"rewards\.r\.function\.name: got 'digits'; expected one of digit_share"):
        resolve(Reward(name="r", function=RewardFunction.model_construct(name="digits", import_path=None)))


def test_a_function_of_the_users_own_is_called_once_with_lists(module):
    name, _ = module("""
        calls = []
        def score(prompts, responses, **columns):
            calls.append((prompts, responses, columns))
            return [len(r) for r in responses]
    """)
    found = resolve(own(f"{name}:score"))
    rows = [{"answer": "1"}, {"level": 2}, {}]
    scores = found.score(np.array(["a", "b", "c"], dtype=object), ["x", "", "xyz"], rows)
    assert (scores.tolist(), scores.dtype) == ([1.0, 0.0, 3.0], np.float32)
    expected = {"answer": ["1", None, None], "level": [None, 2, None]}
    assert importlib.import_module(name).calls == [(["a", "b", "c"], ["x", "", "xyz"], expected)]


def test_the_examples_function_compares_the_last_number(monkeypatch):
    monkeypatch.setattr("sys.path", list(sys.path))
    extend_path([str(Path(__file__).parents[2] / "examples" / "my-rewards")])
    found = resolve(own("my_rewards:correct"))
    responses = ["2 and 2 is 4.", "1,234.50", "-3", "3", "none", "4"]
    rows = [{"answer": "4"}, {"answer": 1234.5}, {"answer": -3}, {"answer": "-3"}, {"answer": "0"}, {}]
    assert found.score([""] * 6, responses, rows).tolist() == [1, 1, 1, 0, 0, 0]


def test_a_module_that_is_not_there():
    assert "there is no module nowhere" in refusal("nowhere.to:be_found")


def test_a_module_that_cannot_be_imported_names_the_line(module):
    name, file = module("import os\nimport not_installed_here\n")
    assert f"imports `not_installed_here`, which is not installed at {file}:2" in refusal(f"{name}:f")
    name, file = module("x = 1\nraise SystemExit('bye')\n")
    assert f"raises SystemExit: bye at {file}:2" in refusal(f"{name}:f")
    name, file = module("def f(:\n")
    assert f"{file}:1" in refusal(f"{name}:f")


def test_an_attribute_that_is_missing_or_no_function(module):
    name, _ = module("def score(prompts, responses): ...\nlimit = 3\n")
    assert f"did you mean `{name}:score`?" in refusal(f"{name}:scores")
    assert f"{name}:limit, a int; expected a function" in refusal(f"{name}:limit")


def test_an_exception_names_the_users_line_and_not_ours(module):
    name, file = module("""
        import json
        def score(prompts, responses, **columns):
            return [helper(r) for r in responses]
        def helper(text):
            return json.loads(text)
    """)
    with pytest.raises(RewardError) as caught:
        resolve(own(f"{name}:score")).score(["p"], ["{"], [{}])
    message = str(caught.value)
    assert message.startswith(f"rewards.mine ({name}:score): got JSONDecodeError: ")
    assert f"at {file}:6 in helper" in message
    assert caught.value.exit_code == 3


def test_a_function_that_ends_the_process_is_an_error_of_the_reward():
    with pytest.raises(RewardError, match="SystemExit: 7"):
        term(lambda prompts, responses, **_: exit(7)).score(["p"], ["r"], [{}])


def test_arguments_that_do_not_match_name_the_function(module):
    name, file = module("def score(prompts, responses):\n    return [1]\n")
    with pytest.raises(RewardError, match=rf"unexpected keyword argument 'answer' at {file}:1 in score"):
        resolve(own(f"{name}:score")).score(["p"], ["r"], [{"answer": 1}])


@pytest.mark.parametrize(
    "result",
    [
        [1, 0.5, True],
        (1, 0.5, 1),
        np.array([1, 0.5, 1]),
        np.array([1, 0.5, 1], dtype=np.float16),
        torch.tensor([1, 0.5, 1], dtype=torch.bfloat16),
        torch.tensor([1, 0.5, 1], requires_grad=True),
        [np.float32(1), torch.tensor(0.5), np.int64(1)],
    ],
)
def test_numbers_are_taken_in_any_of_the_usual_forms(result):
    scores = term(lambda prompts, responses, **_: result).score(["p"] * 3, ["r"] * 3, [{}] * 3)
    assert scores.tolist() == [1.0, 0.5, 1.0]


@pytest.mark.parametrize(
    ("result", "got"),
    [
        ([1.0], "got 1 scores; expected 3, one a response"),
        ([1.0] * 4, "got 4 scores; expected 3"),
        (np.ones((2, 3)), "got 2 scores; expected 3"),
        (0.5, "got float; expected a list of 3 numbers"),
        (torch.tensor(1.0), "got Tensor; expected a list of 3 numbers"),
        (None, "got NoneType; expected a list"),
        ("abc", "got str; expected a list"),
        ({"a": 1}, "got dict; expected a list"),
        ([1, float("nan"), float("inf")], "got nan for response 1 ('second')"),
        (torch.tensor([1, 1, -torch.inf]), "got -inf for response 2 ('third')"),
        ([1e39, 1, 1], "got 1e+39 for response 0"),
        ([10**400, 1, 1], "for response 0"),
        ([1, None, 1], "got None for response 1"),
        ([1, "1", 1], "got '1' for response 1"),
        ([1, 1j, 1], "got 1j for response 1"),
        (np.ones((3, 2)), "got [1.0, 1.0] for response 0"),
        ([1, torch.ones(2), 1], "for response 1"),
    ],
)
def test_a_result_that_is_not_one_finite_number_a_response(result, got):
    with pytest.raises(RewardError) as caught:
        term(lambda prompts, responses, **_: result).score(["p"] * 3, ["first", "second", "third"], [{}] * 3)
    assert got in str(caught.value)
    assert str(caught.value).startswith("rewards.mine (mod:f): got ")


def test_folders_come_first_on_the_path_in_their_order(monkeypatch):
    monkeypatch.setattr(sys, "path", ["/a", "/b", "/c"])
    extend_path(["/c", "/new"])
    extend_path(["/c", "/new"])
    assert sys.path == ["/c", "/new", "/a", "/b"]


def batch_of(responses: list[str], answers: list[object]) -> DataProto:
    return DataProto.from_dict(
        {"sample_index": torch.arange(len(responses))},
        {"prompt": ["p"] * len(responses), "response": responses, "columns": [{"answer": a} for a in answers]},
    )


def worker_of(make_config, rewards: list[dict], python_path: tuple[str, ...] = ()) -> RewardWorker:
    return RewardWorker(make_config(rewards=rewards, pythonPath=list(python_path)))


def dispatched(workers: list[RewardWorker], batch: DataProto) -> DataProto:
    """What a group of these workers answers: the rows dealt out, scored, and joined again."""
    mode = MODES[registered_methods(RewardWorker)["score"].dispatch_mode]
    call = mode.dispatch(len(workers), (batch,), {})
    results = [worker.score(part) for worker, part in zip(workers, call.args[0].values, strict=True)]
    return mode.collect(call, results)


SOURCE = """
    seen = []
    def echo(prompts, responses, answer, **_):
        seen.append(list(responses))
        return [float(r) for r in responses]
    def twice(prompts, responses, **_):
        return [2 * float(r) for r in responses]
"""


@given(values=st.lists(st.integers(-1000, 1000), min_size=1, max_size=9), world_size=st.integers(1, 4))
def test_scores_keep_their_order_and_padding_never_reaches_a_function(
    make_config, tmp_path_factory, values, world_size
):
    folder = tmp_path_factory.getbasetemp() / "order"
    folder.mkdir(exist_ok=True)
    (folder / "order_rewards.py").write_text(textwrap.dedent(SOURCE))
    rewards = [
        {"name": "echo", "weight": 0.5, "function": {"importPath": "order_rewards:echo"}},
        {"name": "twice", "weight": -1.0, "function": {"importPath": "order_rewards:twice"}},
    ]
    workers = [worker_of(make_config, rewards, (str(folder),)) for _ in range(world_size)]
    import order_rewards

    order_rewards.seen.clear()
    result = dispatched(workers, batch_of([str(value) for value in values], ["x"] * len(values)))
    assert result.batch["reward/echo"].tolist() == values
    assert result.batch["reward/twice"].tolist() == [2 * value for value in values]
    assert result.batch["scores"].tolist() == [0.5 * value - 2 * value for value in values]
    assert result.batch["scores"].dtype == torch.float32
    assert [text for call in order_rewards.seen for text in call] == [str(value) for value in values]


def test_a_worker_scores_with_the_rows_own_answers(make_config):
    worker = worker_of(make_config, [{"name": "right", "weight": 3, "function": {"name": "exact_match"}}])
    result = worker.score(batch_of(["12", "5", "7"], ["12", "6", "7"]))
    assert result.batch["scores"].tolist() == [3.0, 0.0, 3.0]
    assert not RewardWorker.needs_process_group
    assert not registered_methods(RewardWorker)["score"].blocking


def test_an_evaluation_draws_nothing_from_a_functions_generator(make_config, module):
    name, _ = module("""
        import random
        def noise(prompts, responses, **_):
            return [random.random() for _ in responses]
    """)
    worker = worker_of(make_config, [{"name": "noise", "function": {"importPath": f"{name}:noise"}}])
    random.seed(1)
    expected = [worker.score(batch_of(["a"], ["b"])).batch["scores"].item() for _ in range(2)]
    random.seed(1)
    first = worker.score(batch_of(["a"], ["b"])).batch["scores"].item()
    assert len(set(worker.evaluate(batch_of(["a"] * 3, ["b"] * 3)).batch["scores"].tolist())) == 3
    assert [first, worker.score(batch_of(["a"], ["b"])).batch["scores"].item()] == expected


def test_weights_that_overflow_are_an_error(make_config):
    worker = worker_of(make_config, [{"name": "right", "weight": 1e39, "function": {"name": "exact_match"}}])
    with pytest.raises(RewardError, match="weighted sum of 1e"):
        worker.score(batch_of(["1"], ["1"]))
