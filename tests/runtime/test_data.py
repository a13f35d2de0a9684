import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlhf_api.data import Prompts
from rlhf_runtime.data import PromptLoader, make_batch, tokenize
from rlhf_runtime.errors import InputError
from rlhf_runtime.models import ascii_tokenizer
from rlhf_runtime.rows import Row, load_rows
from rlhf_runtime.types import Prompt

TOKENIZER = ascii_tokenizer()


def prompts_of(count: int) -> list[Prompt]:
    return [Prompt(index, f"p{index}", [index + 1], {"answer": str(index)}) for index in range(count)]


def problem(path: Path, content: bytes | str, field: str = "prompt") -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError) as caught:
        load_rows(Prompts(path=str(path), field=field))
    return str(caught.value)


def test_rows_of_a_file_keep_their_order_and_their_other_fields(tmp_path):
    path = tmp_path / "train.jsonl"
    rows = [{"question": "1+1=", "answer": "2", "level": 3}, {"question": "a\u2028b", "answer": None}]
    path.write_text("\ufeff" + "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\r\n\r\n")
    first, second = load_rows(Prompts(path=str(path), field="question"))
    assert (first.text, first.columns) == ("1+1=", {"answer": "2", "level": 3})
    assert (second.text, second.columns) == ("a\u2028b", {"answer": None})
    assert second.where == f"{path}:2"


@given(
    st.lists(st.dictionaries(st.text().filter(lambda key: key not in ("prompts", "responses")), st.text()), min_size=1)
)
def test_whatever_json_can_hold_arrives_as_it_was_written(tmp_path_factory, extras):
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    rows = [{**extra, "prompt": "x"} for extra in extras]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    expected = [{name: value for name, value in row.items() if name != "prompt"} for row in rows]
    assert [row.columns for row in load_rows(Prompts(path=str(path)))] == expected


def test_inline_rows_are_texts_or_objects():
    rows = load_rows(Prompts(inline=["hello", {"prompt": "7+5=", "answer": "12"}]))
    assert [(row.text, row.columns) for row in rows] == [("hello", {}), ("7+5=", {"answer": "12"})]
    with pytest.raises(InputError, match=r"data\.prompts\.inline\[1\]: prompt: got an empty text"):
        load_rows(Prompts(inline=["hello", ""]))


def test_the_arithmetic_set_is_right():
    rows = load_rows(Prompts(builtin="arithmetic"))
    assert len({row.text for row in rows}) == 100
    for row in rows:
        left, right = row.text.removesuffix("=").split("+")
        assert row.columns == {"answer": str(int(left) + int(right))}


@pytest.mark.parametrize(
    ("content", "place", "got"),
    [
        ('{"prompt": "a"}\n{"prompt": \n', ":2", "malformed JSON"),
        ('{"prompt": "a"}\n\n["a"]\n', ":3", "a list"),
        ('"a"', ":1", "a text"),
        ("null", ":1", "null"),
        ("[" * 100_000, ":1", "malformed JSON"),
        ('{"text": "a"}', ":1", "only `text`"),
        ("{}", ":1", "no fields"),
        ('{"prompt": 3}', ":1: prompt", "a number"),
        ('{"prompt": null}', ":1: prompt", "null"),
        ('{"prompt": ["a"]}', ":1: prompt", "a list"),
        ('{"prompt": ""}', ":1: prompt", "an empty text"),
        ('{"prompt": "a", "responses": 1}', ":1", "a field `responses`"),
        ('{"prompt": "a", "b": ["\\ud800"]}', ":1", "half a character"),
        (b'{"prompt": "a"}\n{"prompt": "\xff"}', ":2", "a byte that is not UTF-8 at column 13"),
        ("", "", "no rows"),
        ("\n\n", "", "no rows"),
    ],
)
def test_a_bad_file_is_told_by_file_and_line(tmp_path, content, place, got):
    path = tmp_path / "train.jsonl"
    message = problem(path, content)
    assert message.startswith(f"{path}{place}: got {got}")
    assert "; expected " in message
    assert ". Fix: " in message
    assert message.count("\n") == 0


def test_a_missing_file_and_a_folder_are_told_by_path(tmp_path):
    for path, why in ((tmp_path / "no.jsonl", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(InputError, match=rf"data\.prompts\.path: got {path} \({why}"):
            load_rows(Prompts(path=str(path)))


def test_all_bad_lines_are_told_at_once_up_to_ten(tmp_path):
    lines = problem(tmp_path / "a.jsonl", '{"prompt": "a"}\n[]\n{"prompt": 1}\n').splitlines()
    assert [line.split(": got ")[0] for line in lines] == [f"{tmp_path}/a.jsonl:2", f"{tmp_path}/a.jsonl:3: prompt"]
    lines = problem(tmp_path / "a.jsonl", "[]\n" * 25).splitlines()
    assert len(lines) == 11
    assert lines[-1] == "and 15 more problems"


def test_bad_data_is_told_without_importing_torch(tmp_path):
    (tmp_path / "bad.jsonl").write_text("[]")
    code = (
        "import sys; from rlhf_api.data import Prompts; from rlhf_runtime.rows import load_rows, InputError\n"
        "try: load_rows(Prompts(path=sys.argv[1]))\n"
        "except InputError as error: sys.exit(40 + error.exit_code + 10 * ('torch' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "bad.jsonl")], check=False).returncode == 42


def test_tokens_are_the_prompts_own():
    rows = [Row("a:1", "7+5=", {"answer": "12"}), Row("a:2", "x", {})]
    first, second = tokenize(rows, TOKENIZER, max_prompt_length=4)
    assert TOKENIZER.decode(first.token_ids) == "7+5="
    assert (first.index, first.columns, second.index, len(second.token_ids)) == (0, {"answer": "12"}, 1, 1)


def test_a_prompt_that_does_not_fit_is_refused_by_row_not_cut():
    rows = [Row("a.jsonl:1", "fits", {}), Row("a.jsonl:2", "too long", {}), Row("a.jsonl:3", "\u00e9", {})]
    with pytest.raises(InputError) as caught:
        tokenize(rows, TOKENIZER, max_prompt_length=4)
    first, second = str(caught.value).splitlines()
    assert first.startswith("a.jsonl:2: got a prompt of 8 tokens; expected at most 4 tokens")
    assert second.startswith("a.jsonl:3: got a prompt of 0 tokens")


@given(count=st.integers(1, 12), batch_size=st.integers(1, 20), seed=st.integers(0, 2**31))
def test_every_prompt_comes_once_an_epoch_whatever_the_batch_size(count, batch_size, seed):
    batches = PromptLoader(prompts_of(count), batch_size, seed)
    seen = []
    while len(seen) < 3 * count:
        batch = next(batches)
        assert len(batch) == batch_size
        seen += [prompt.index for prompt in batch]
    for epoch in range(3):
        assert sorted(seen[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_the_order_changes_with_the_epoch_and_the_seed_and_nothing_else():
    def order(seed: int, batches: int = 4) -> list[list[int]]:
        loader = PromptLoader(prompts_of(50), 25, seed)
        return [[prompt.index for prompt in next(loader)] for _ in range(batches)]

    one = order(1)
    assert order(1) == one
    assert order(2) != one
    assert one[0] + one[1] != one[2] + one[3]
    assert one[0] != sorted(one[0])


@pytest.mark.parametrize("taken", [0, 1, 2, 3])  # 2 is the end of an epoch
def test_a_loader_goes_on_from_a_saved_position(taken):
    whole = PromptLoader(prompts_of(6), 3, seed=5)
    for _ in range(taken):
        next(whole)
    resumed = PromptLoader(prompts_of(6), 3, seed=5)
    resumed.load_state_dict(whole.state_dict())
    for _ in range(5):
        assert next(resumed) == next(whole)


def test_samples_of_a_prompt_stand_side_by_side():
    batch = make_batch(prompts_of(2), samples_per_prompt=3)
    assert batch.batch["sample_index"].tolist() == [0, 1, 2, 3, 4, 5]
    assert [row.tolist() for row in batch.batch["prompt_ids"].unbind()] == [[1]] * 3 + [[2]] * 3
    assert batch.non_tensor_batch["prompt"].tolist() == ["p0"] * 3 + ["p1"] * 3
    assert [row["answer"] for row in batch.non_tensor_batch["columns"]] == ["0"] * 3 + ["1"] * 3
