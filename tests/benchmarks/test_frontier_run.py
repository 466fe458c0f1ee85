"""A whole run on a tiny random model: file, repetition, resumption, report, errors."""

import copy
import dataclasses
import json

import checkpoints
import jax
import pytest

import polestar_jax as pj
from benchmarks.ablations import ablations
from benchmarks.embedded.plan import PLANS
from benchmarks.embedded.vocabulary import save_tokenizer
from benchmarks.frontier import runner
from benchmarks.frontier.cli import frontier, run_command
from benchmarks.frontier.plots import draw
from benchmarks.frontier.report import markdown
from benchmarks.frontier.runner import Request, execute, prepare
from benchmarks.frontier.settings import frontier_settings
from benchmarks.frontier.store import check, read_run
from benchmarks.frontier.workload import FAMILIES, batches, make_workload
from benchmarks.tasks import TASKS
from polestar_jax.errors import PolestarError

POLICIES = ("vanilla", "polestar-commit")
VALUES = {"threshold": (0.5, 0.9), "tokens_per_pass": (4,)}
LABELS = ["vanilla tokens_per_pass=4"] + [f"polestar-commit threshold={t}" for t in (0.5, 0.9)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A directory: the embedded model's tokenizer with tiny random weights."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    raw = dataclasses.replace(PLANS["quick"], width=16, layers=2, heads=2, mlp_width=24).hf_config()
    checkpoints.write(folder, raw, [checkpoints.random_tensors(raw)])
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def request_for(model):
    def make(path, **changes):
        values = {
            "kind": "frontier", "model": str(model), "dtype": "float32",
            "tasks": ("sudoku", "add", "latin"), "limit": 3, "seeds": (0, 1), "data": None,
            "prompts": "auto", "gen_length": 16, "block_length": 4, "batch_size": 4, "path": path,
            "restart": False, "trace": True, "quiet": True, "command": "a test",
        }  # fmt: skip
        return Request(**(values | changes))

    return make


def go(request, policies=POLICIES):
    prepared = prepare(request)
    return execute(prepared, frontier_settings(policies, prepared.canvas, VALUES), request)


@pytest.fixture(scope="module")
def finished(request_for, tmp_path_factory):
    """The run, and the request it came from."""
    request = request_for(tmp_path_factory.mktemp("results") / "run.json")
    return go(request), request


def outcome(run):
    """What a repetition must reproduce: everything but times and memory."""
    found = {}
    for label, record in run["records"].items():
        for name, task in record["tasks"].items():
            kept = {k: v for k, v in task.items() if "second" not in k}
            found[label, name] = kept
    return found


def test_every_family_has_a_task_and_every_task_one_family():
    listed = [task for tasks in FAMILIES.values() for task in tasks]
    assert sorted(listed) == sorted(TASKS)


def test_file_on_disk_is_the_run_and_holds_every_setting(finished):
    run, request = finished
    assert read_run(request.path) == json.loads(json.dumps(run))
    assert list(run["records"]) == LABELS
    assert run["identity"]["tasks"] == {"sudoku": 4, "add": 6, "latin": 4}  # 2 seeds
    assert not list(request.path.parent.glob(".*"))


def test_numbers_of_a_record_agree_with_each_other(finished):
    for record in finished[0]["records"].values():
        every = record["all"]
        assert every["prompts"] == 14
        assert sum(every["passes"].values()) == pytest.approx(every["nfe"])
        assert sum(every["commits"].values()) == pytest.approx(16)
        forward = every["answer_tokens"] / every["nfe"]
        assert every["tokens_per_forward"] == pytest.approx(forward)
        low, high = every["tokens_per_forward_interval"]
        assert low <= forward <= high
        marks = "".join(task["marks"] for task in record["tasks"].values())
        assert every["accuracy"] == pytest.approx(marks.count("1") / 14)


def test_same_seeds_give_identical_answers_accuracy_and_nfe(finished, request_for, tmp_path):
    run, _ = finished
    again = go(request_for(tmp_path / "again.json", trace=False), ["vanilla"])
    expected = {key: value for key, value in outcome(run).items() if key[0] == LABELS[0]}
    assert outcome(again) == expected


def test_one_program_serves_all_thresholds_of_a_policy(finished):
    compiled = [record["compile_seconds"] > 0 for record in finished[0]["records"].values()]
    assert compiled == [True, True, False]


def test_finished_settings_are_not_measured_again(finished, monkeypatch):
    run, request = finished
    monkeypatch.setattr(runner, "measure", lambda *_: pytest.fail("measured again"))
    monkeypatch.setattr(runner, "measure_drift", lambda *_: pytest.fail("measured again"))
    assert go(request)["records"] == json.loads(json.dumps(run["records"]))


def test_interrupted_run_leaves_a_whole_file_and_resumes_with_the_rest(
    finished, request_for, tmp_path, monkeypatch
):
    request = request_for(tmp_path / "run.json", trace=False)
    stored = finished[0]["records"]
    served = []

    def measure(_model, setting, *_):
        if len(served) == 1:
            raise KeyboardInterrupt
        served.append(setting.label)
        record = {k: v for k, v in stored[setting.label].items() if k not in ("date", "revision")}
        return record, None

    monkeypatch.setattr(runner, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        go(request)
    assert list(read_run(request.path)["records"]) == LABELS[:1]
    served.clear()
    with pytest.raises(KeyboardInterrupt):
        go(request)
    assert served == [LABELS[1]]
    assert list(read_run(request.path)["records"]) == LABELS[:2]


def test_equal_configurations_are_measured_once(finished, monkeypatch):
    run, request = finished
    prepared = prepare(request)
    monkeypatch.setattr(runner, "measure", lambda *_: pytest.fail("measured again"))
    settings = frontier_settings(POLICIES[1:], prepared.canvas, VALUES)
    twin = dataclasses.replace(settings[1], policy="twin", knob="name", value="other")
    monkeypatch.setattr(runner, "save_run", lambda *_: None)
    record = execute(prepared, [twin], request)["records"]["twin name=other"]
    assert record["tasks"] == run["records"][LABELS[2]]["tasks"]
    assert (record["policy"], record["knob"], record["value"]) == ("twin", "name", "other")


def test_file_of_other_settings_is_refused_and_kept(finished, request_for):
    _, request = finished
    before = request.path.read_bytes()
    with pytest.raises(PolestarError, match="made with tasks 'add': 6, now 8; .* --restart"):
        go(request_for(request.path, limit=4))
    assert request.path.read_bytes() == before


def test_file_without_a_record_yet_blocks_nothing(request_for, tmp_path):
    request = request_for(tmp_path / "run.json", trace=False)
    execute(prepare(request), [], request)
    assert read_run(request.path)["records"] == {}
    request = request_for(request.path, trace=False, limit=4)
    other = prepare(request)
    execute(other, [], request)
    assert read_run(request.path)["identity"] == other.run["identity"]


def test_preparing_a_run_that_is_then_refused_leaves_the_old_file(finished, request_for):
    _, request = finished
    before = request.path.read_bytes()
    prepare(request_for(request.path, restart=True))
    assert request.path.read_bytes() == before


@pytest.mark.parametrize("fact", ["device", "cores", "jax"])
def test_times_of_two_machines_are_not_mixed(finished, request_for, fact):
    run, request = finished
    prepared = prepare(request)
    made = copy.deepcopy(prepared.run["environment"])
    (made["packages"] if fact == "jax" else made)[fact] = "another" if fact != "cores" else 3
    other = dataclasses.replace(prepared, run={**prepared.run, "environment": made})
    with pytest.raises(PolestarError, match="measured on .*, this is .* --restart"):
        execute(other, [], request)
    assert read_run(request.path)["records"] == json.loads(json.dumps(run["records"]))


@pytest.mark.parametrize("damage", ["not json", "{}", None])
def test_damaged_result_file_is_refused(finished, request_for, tmp_path, damage):
    if damage is None:
        run = copy.deepcopy(finished[0])
        run["records"][LABELS[0]]["all"]["accuracy"] = 1.5
        damage = json.dumps(run)
    (tmp_path / "run.json").write_text(damage)
    with pytest.raises(PolestarError, match="result file"):
        go(request_for(tmp_path / "run.json"))


@pytest.mark.parametrize("place", ["records", "identity", "environment"])
def test_schema_refuses_a_missing_and_an_unknown_field(finished, place):
    run = json.loads(json.dumps(finished[0]))
    check(run, "run")
    part = run[place] if place != "records" else run["records"][LABELS[0]]
    removed = part.pop(next(iter(part)))
    with pytest.raises(PolestarError, match="is not a result file"):
        check(run, "run")
    part |= {"more": removed}
    with pytest.raises(PolestarError, match="is not a result file"):
        check(run, "run")


def test_report_has_a_row_for_every_setting_and_pictures_are_written(finished, tmp_path):
    run, _ = finished
    text = markdown(run)
    for record in run["records"].values():
        setting = f"| {record['policy']} | {record['knob'].replace('_', ' ')} {record['value']} |"
        assert text.count(setting) >= 1 + len(run["families"])
    assert "drift spike" in text
    text = markdown({**run, "identity": {**run["identity"], "kind": "ablations"}})
    assert text.count("\n## Threshold\n") == text.count("\n## Tokens per pass\n") == 1
    paths = draw(run, tmp_path / "picture")
    names = [p.name.removeprefix("picture") for p in paths]
    assert names == ["_causes.png", ".png", "_tasks.png", "_drift.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in paths)


def fails(capsys, command, *arguments):
    """Run a command that must fail; what it says."""
    with pytest.raises(SystemExit) as stopped:
        run_command(command, [str(a) for a in arguments])
    said = capsys.readouterr().err
    assert stopped.value.code == 2
    assert "Traceback" not in said
    return said


def test_user_errors_are_one_sentence_and_exit_code_2(capsys, model, tmp_path):
    out = ("--out", tmp_path / "out", "--quiet")
    (tmp_path / "empty").mkdir()
    cases = {
        ("--model", tmp_path / "none"): "none is not a directory",
        ("--model", model, "--tasks", "copy,chess"): "unknown task 'chess'; known: copy",
        ("--model", model, "--policies", "magic"): "unknown policy 'magic'; known: vanilla",
        ("--model", model, "--data", tmp_path / "empty"): "holds no ParallelBench rows",
        ("--model", model, "--data", tmp_path / "no"): "not a directory of ParallelBench files",
        ("--model", model, "--seeds", "0,1", "--data", tmp_path): "give one seed",
        ("--model", model, "--seeds", "x"): "comma-separated numbers",
        ("--model", model, "--seeds", str(2**63)): "seed must be below",
        ("--model", model, "--thresholds", "1.5"): "threshold",
        ("--model", model, "--block-length", "7"): "multiple of block_length",
    }
    for arguments, message in cases.items():
        said = fails(capsys, frontier, *arguments, *out)
        assert message in said
        assert said.strip().count("\n") == 0
    assert "unknown group 'x'" in fails(capsys, ablations, "--groups", "x", *out)
    assert not (tmp_path / "out").exists()


def test_missing_and_damaged_weights_are_named(capsys, model, tmp_path):
    for name, content in (("gone", None), ("cut", b"\x00" * 40)):
        folder = tmp_path / name
        folder.mkdir()
        for path in model.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        weights = folder / "model.safetensors"
        weights.unlink() if content is None else weights.write_bytes(content)
        said = fails(capsys, frontier, "--model", folder, "--out", tmp_path / "out", "--quiet")
        assert str(folder) in said
        assert said.strip().count("\n") == 0


def test_batch_size_changes_neither_prompts_nor_random_keys(model):
    loaded = pj.load(model)
    rows = make_workload(loaded, ("copy", "add"), 7, (0, 5)).rows["add"]
    config = pj.preset("parallel", gen_length=8, block_length=8, prompt_bucket=16)

    def collected(size):
        found = {}
        for part, prompts, keys in batches(loaded, rows, size, config):
            assert prompts.tokens.shape[0] == size
            for i, row in enumerate(part):
                key = tuple(jax.random.key_data(keys[i]).tolist())
                found[row.seed, row.number] = (key, prompts.tokens[i].tolist())
        return found

    one = collected(3)
    assert one == collected(5)
    assert len(one) == len({key for key, _ in one.values()}) == 14
