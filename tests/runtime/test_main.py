from rlhf_runtime import __main__ as program


def test_an_error_that_cannot_be_kept_is_told_before_its_details(make_config, tmp_path, monkeypatch, capsys):
    def fill_the_disk(config):
        raise ValueError("no room for weights")

    monkeypatch.setattr(program, "_train", fill_the_disk)
    (tmp_path / "error.log").symlink_to("/dev/full")
    (tmp_path / "runtime.json").write_text(make_config(runDir=str(tmp_path)).model_dump_json(by_alias=True))
    assert program._end_of(tmp_path / "runtime.json") == 1
    first, *details = capsys.readouterr().err.splitlines()
    assert first == "Unexpected ValueError: no room for weights"
    assert details[-1] == "ValueError: no room for weights"
