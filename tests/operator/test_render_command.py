import io
import json
from pathlib import Path

import pytest
import yaml
from rlhf_api import RuntimeConfig
from rlhf_operator.cli import app
from rlhf_operator.cluster_plan import plan_cluster
from rlhf_operator.manifest import read_manifest
from rlhf_operator.manifests import render
from ruamel.yaml import YAML
from typer.testing import CliRunner

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


@pytest.fixture
def rlhf():
    def rlhf(*arguments):
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return rlhf


def test_what_is_printed_is_what_is_rendered_for_readers_of_either_yaml(rlhf):
    done = rlhf("render", *EXAMPLES, "--default-image", "runtime:1")
    assert done.exit_code == 0
    objects = [
        made for file in EXAMPLES for made in render(plan_cluster(read_manifest(file), "runtime:1"), None, 1).objects
    ]
    assert list(yaml.load_all(done.stdout, Loader=yaml.CSafeLoader)) == objects
    assert list(YAML(typ="safe", pure=True).load_all(io.StringIO(done.stdout))) == objects
    assert rlhf("render", *EXAMPLES, "--default-image", "runtime:1").stdout == done.stdout
    config = next(made for made in objects if made["kind"] == "ConfigMap")["data"]["runtime.json"]
    assert RuntimeConfig.model_validate_json(config).local_nodes is None


@pytest.mark.parametrize(
    "text", ["no", "1e3", "0x10", "12:30:00", "1_000", "~", "a: b", " x", "tail ", "#", "", "a\nb "]
)
def test_texts_that_look_like_something_else_stay_texts(rlhf, tmp_path, text):
    document = yaml.safe_load((EXAMPLES[0]).read_text())
    document["spec"] |= {"image": "runtime:1", "env": [{"name": "A", "value": text}]}
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps(document))
    objects = list(yaml.safe_load_all(rlhf("render", file).stdout))
    [container] = objects[-1]["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    assert {"name": "A", "value": text} in container["env"]


def test_mistakes_are_told_by_file_and_nothing_is_printed(rlhf):
    done = rlhf("render", *EXAMPLES[:2])
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.count("spec.image: got nothing") == 2
    assert str(EXAMPLES[1]) in done.stderr
