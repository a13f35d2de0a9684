import contextlib
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlhf_api import SpecError
from rlhf_operator.manifest import read_manifest

QUICKSTART = Path(__file__).parents[2] / "examples" / "01-quickstart.yaml"


@pytest.fixture
def file(tmp_path):
    return tmp_path / "job.yaml"


def error_of(file):
    with pytest.raises(SpecError) as caught:
        read_manifest(file)
    [error] = caught.value.errors
    return error


def with_learning_rate(number):
    return re.sub(r"optimizer: .*", f"optimizer: {{learningRate: {number}}}", QUICKSTART.read_text())


@pytest.mark.parametrize("number", ["1e-6", "1E-6", "1.0e-6", "+1e-06", "0.000001", "1.e-6"])
def test_every_way_to_write_a_number_means_the_same(file, number):
    file.write_text(with_learning_rate(number))
    assert read_manifest(file).spec.training.optimizer.learning_rate == 1e-6


def test_a_quoted_number_is_refused(file):
    file.write_text(with_learning_rate("'1e-6'"))
    assert error_of(file).fix == "write the number without quotes"


@pytest.mark.parametrize(
    ("text", "line", "got"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, 'duplicate key "a"'),
        ("a: 1\nb: [1, 2\n", 3, "while parsing a flow sequence"),
        ("a: 1\n\tb: 2\n", 2, "found character"),
        ("a: *nowhere\n", 1, "undefined alias"),
        ("a: !!python/object:os.system {}\n", 1, "could not determine a constructor"),
    ],
)
def test_broken_yaml_is_told_with_its_line(file, text, line, got):
    file.write_text(text)
    error = error_of(file)
    assert error.path == f"{file}:{line}"
    assert got in error.got


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "null\n"])
def test_an_empty_file(file, text):
    file.write_text(text)
    assert error_of(file).got == "an empty file"


def test_several_documents(file):
    file.write_text("a: 1\n---\nb: 2\n")
    assert (error_of(file).path, error_of(file).got) == (str(file), "2 documents")


def test_a_file_that_cannot_be_read(file, tmp_path):
    assert "No such file" in error_of(file).got
    assert "Is a directory" in error_of(tmp_path).got
    file.write_bytes(b"a: \xff\n")
    assert "UTF-8" in error_of(file).got


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_damaged_file_is_read_or_refused(tmp_path_factory, data):
    text = QUICKSTART.read_text()
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 40)))
    damage = data.draw(st.text(st.sampled_from("{}[]:,-&*!|>'\"%@`#? \n\t01eE.~a\x00\u2028é"), max_size=12))
    file = tmp_path_factory.getbasetemp() / "damaged.yaml"
    file.write_text(text[:start] + damage + text[end:], encoding="utf-8")
    with contextlib.suppress(SpecError):
        read_manifest(file)


@pytest.mark.parametrize(
    "text",
    ["[" * 400 + "]" * 400, "a: 2024-13-45\n", "a: &a [*a]\n", "? [1]\n: 2\n", "<<: 1\n", "%YAML 3.0\n---\na: 1\n"],
)
def test_strange_yaml_is_refused_without_a_traceback(file, text):
    file.write_text(text)
    with pytest.raises(SpecError):
        read_manifest(file)


@pytest.mark.parametrize(
    ("scalar", "value"),
    [("yes", True), ("off", False), ("n", False), ("010", 8), ("-0_17", -15), ("08", 8), ("2026-01-01", "2026-01-01"),
     ("'yes'", "yes"), ("!!str yes", "yes"), ("yess", "yess"), ("1e3", 1000.0)],
)  # fmt: skip
def test_scalars_are_what_the_api_server_makes_of_them(file, scalar, value):
    file.write_text(re.sub(r"config:\n", f"config:\n          odd: {scalar}\n", QUICKSTART.read_text()))
    assert read_manifest(file).spec.models.policy.random.config["odd"] == value
    assert type(read_manifest(file).spec.models.policy.random.config["odd"]) is type(value)
