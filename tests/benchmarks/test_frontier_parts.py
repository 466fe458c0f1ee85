"""The harness's parts: traced knobs, counted arithmetic, intervals, rows, drift, ablations."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polestar_jax as pj
from benchmarks.ablations import GROUPS, ablation_settings
from benchmarks.frontier.cost import pass_flops, passes_by_block, row_cost, work
from benchmarks.frontier.drift import seen_rows
from benchmarks.frontier.intervals import difference, interval, mean, ratio
from benchmarks.frontier.programs import compile_program, run_program, split_knobs
from benchmarks.frontier.settings import Canvas, frontier_settings
from benchmarks.frontier.workload import choose_examples
from polestar_jax.decoding import loop
from polestar_jax.decoding.decode import DecodeStats, context_of
from polestar_jax.decoding.prompts import prepare_prompts
from polestar_jax.decoding.state import PASS_KINDS
from polestar_jax.errors import PolestarError

CONFIG = pj.ModelConfig.from_hf(
    {
        "model_type": "llada", "vocab_size": 40, "d_model": 32, "n_layers": 3, "n_heads": 2,
        "mlp_hidden_size": 48, "max_sequence_length": 96, "weight_tying": False,
        "mask_token_id": 39, "eos_token_id": 38, "pad_token_id": 38,
    }
)  # fmt: skip
PROMPTS = [[1, 2, 3, 4, 5], [6, 7, 8]]
LENGTHS = {"gen_length": 16, "block_length": 4, "prompt_bucket": 8}


@pytest.fixture(scope="module")
def model():
    return pj.Model.random(CONFIG, jax.random.key(3))


@pytest.mark.parametrize(
    ("preset", "fields"),
    [
        ("fast-dllm-dual", {"threshold": 0.15}),
        ("parallel-factor", {"factor": 2.75}),
        pytest.param(
            "polestar", {"threshold": 0.15, "early_threshold": 0.08}, marks=pytest.mark.slow
        ),
    ],
)
def test_program_with_traced_knobs_decodes_as_decode_does(model, preset, fields):
    config = pj.preset(preset, **LENGTHS, **fields)
    other = pj.preset(preset, **LENGTHS)
    assert split_knobs(config)[0] == split_knobs(other)[0]
    batch = prepare_prompts(model, PROMPTS, config)
    program = compile_program(model, other, batch)
    keys = jax.random.split(jax.random.key(0), len(PROMPTS))
    expected = pj.decode(model, PROMPTS, config)
    default = run_program(program, model, other, batch, keys).result
    result = run_program(program, model, config, batch, keys).result
    np.testing.assert_array_equal(result.tokens, expected.tokens)
    np.testing.assert_array_equal(result.nfe, expected.nfe)
    np.testing.assert_array_equal(result.cause, expected.cause)
    assert (expected.nfe != default.nfe).any(), "the knob changed nothing, so nothing was tested"


def test_switching_early_commits_off_is_another_structure():
    with_early, without = (
        pj.preset("polestar", **LENGTHS, early_threshold=early) for early in (0.7, None)
    )
    assert split_knobs(with_early)[0] != split_knobs(without)[0]


@pytest.mark.parametrize("preset", ["parallel", "fast-dllm-dual"])
def test_counted_arithmetic_of_a_pass_is_close_to_the_compilers(preset):
    """The compiler also counts norms, softmaxes and comparisons: a little more than we do."""
    wide = dataclasses.replace(
        CONFIG, width=128, head_dim=64, mlp_width=256, num_layers=2,
        vocab_size=512, embedding_rows=512,
    )  # fmt: skip
    config = pj.preset(preset, **LENGTHS)
    model = pj.Model.random(wide, jax.random.key(0))
    state = pj.init_state(model, PROMPTS[:1], config)

    def one(params, state):
        ctx = context_of(wide, params, config, state.tokens, state.pad)
        return loop.run_pass(ctx, state, config.cache.phases()[-1])[0]

    counted = jax.jit(one).lower(model.params, state).compile().cost_analysis()["flops"]
    rows = 24 if preset == "parallel" else 4
    ours = pass_flops(wide, row_cost(wide, 24), rows, 4)
    assert ours <= counted <= 1.1 * ours


def result_of(refreshed, **passes):
    """A decoding of one sequence with these passes."""
    counts = {kind: np.array([passes.get(kind, 0)]) for kind in PASS_KINDS}
    nfe = np.array([sum(passes.values())])
    empty = np.zeros((1, 16), np.int32)
    stats = DecodeStats({}, counts, np.array([refreshed]), np.array([16]), 16 / nfe)
    return pj.DecodeResult(empty, nfe, None, stats, None, empty, empty)


def test_work_adds_up_over_passes_and_a_refresh_costs_its_rows():
    config = pj.preset("polestar", **LENGTHS)

    def done(refreshed=0, **passes):
        found = work(CONFIG, config, 24, result_of(refreshed, **passes))
        return float(found.flops[0]), float(found.row_layers[0])

    full, windowed, cached, refresh = (done(**{kind: 1}) for kind in PASS_KINDS)
    assert [kind[1] for kind in (full, windowed, cached, refresh)] == [72, 48, 12, 12]
    assert full[0] > windowed[0] > refresh[0] > cached[0]
    mixed = done(40, full=3, windowed=1, cached=5, refresh=4)
    parts = 3 * full[0] + windowed[0] + 5 * cached[0] + 4 * refresh[0]
    assert mixed[1] == 3 * 72 + 48 + 9 * 12 + 40
    # A refreshed row costs about what a row of a cached pass costs in one layer.
    assert (mixed[0] - parts) / 40 == pytest.approx(cached[0] / 12, rel=0.1)


def test_prefix_cache_is_charged_for_the_rows_it_runs(model):
    config = pj.preset("fast-dllm-prefix", **LENGTHS, threshold=0.15)
    result = pj.decode(model, PROMPTS, config)
    by_block = passes_by_block(result, 4)
    np.testing.assert_array_equal(by_block.sum(axis=1), result.nfe)
    expected = (by_block > 0).sum(axis=1) * 24
    expected = expected + np.maximum(by_block - 1, 0) @ np.array([16, 12, 8, 4])
    np.testing.assert_array_equal(work(CONFIG, config, 24, result).row_layers, 3 * expected)


def test_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(60):
        low, high = interval(mean, (rng.random(200) < 0.8).astype(float))
        hits += low <= 0.8 <= high
    assert 51 <= hits <= 60


def test_interval_of_equal_marks_is_a_point_and_repeats():
    assert interval(mean, np.ones(50)) == (1.0, 1.0)
    values = np.arange(40.0)
    assert interval(mean, values) == interval(mean, values)
    low, high = interval(ratio, values, np.full(40, 2.0))
    assert low < values.sum() / 80 < high
    low, high = interval(difference, values + 1, values)
    assert (low, high) == pytest.approx((1.0, 1.0))


def test_limit_is_dealt_to_the_tasks_of_a_family_and_seeds_bring_new_rows():
    tasks = ("copy", "sort", "latin")
    chosen = choose_examples(tasks, 5, (0, 1), None)
    assert {name: len(rows) for name, rows in chosen.items()} == {"copy": 6, "sort": 6, "latin": 10}
    prompts = [example.prompt for _, example in chosen["latin"]]
    assert len(set(prompts)) == 10
    alone = choose_examples(tasks, 5, (1,), None)
    assert alone["latin"] == chosen["latin"][5:]


def test_rows_of_a_parallelbench_directory_keep_its_own_prompt(tmp_path):
    config = {"metric": "list_match_score", "icl_example_count": 0, "prompt": "Say {context}!"}
    described = json.dumps({"waiting_line/copy": config})  # JSON is YAML too
    (tmp_path / "waiting_line.task_config.yaml").write_text(described)
    row = {"input": {"context": '["A B"]'}, "answer": '["A B"]'}
    (tmp_path / "waiting_line.copy.jsonl").write_text("\n".join([json.dumps(row)] * 3))
    chosen = choose_examples(("copy", "latin"), 2, (0,), tmp_path)
    assert [example.instruction for _, example in chosen["copy"]] == ['Say ["A B"]!'] * 2
    assert list(chosen) == ["copy"]
    with pytest.raises(PolestarError, match="no file of the chosen tasks"):
        choose_examples(("latin",), 2, (0,), tmp_path)


def test_drift_rows_are_the_masked_rows_of_denoising_passes(model):
    config = pj.preset("polestar-commit", **LENGTHS, early_threshold=None, suffix=False)
    result = pj.decode(model, PROMPTS, config, trace=True)
    seen = seen_rows(result, len(PROMPTS), 4)
    trace = result.trace
    # In a block of four rows at one token a pass, passes 1 to 3 see three, two and one masked.
    opening = np.asarray(trace.kind) <= 1
    assert np.asarray(trace.active)[opening].sum() == 8
    masked = np.asarray(trace.masked) & np.asarray(trace.active)[..., None]
    assert len(seen.drift) == masked.sum() - 8 * 4
    assert set(seen.number.tolist()) == {1, 2, 3}
    assert (seen.drift >= 0).all()
    assert seen.stable[seen.committed].all()
    assert np.isfinite(jnp.asarray(seen.delta)).all()


def test_frontier_names_every_setting_once_and_keeps_the_gap_to_the_early_threshold():
    settings = frontier_settings(tuple(pj.PRESETS), Canvas(16, 8))
    labels = [setting.label for setting in settings]
    assert len(set(labels)) == len(labels)
    gaps = {
        round(s.config.commit.threshold - s.config.commit.early_threshold, 6)
        for s in settings
        if s.policy == "polestar"
    }
    assert gaps == {0.2}
    with pytest.raises(PolestarError, match="do not divide"):
        frontier_settings(["vanilla"], Canvas(16, 8), {"tokens_per_pass": (3,)})


def test_every_ablation_changes_one_thing_and_holds_the_default():
    canvas = Canvas(64, 8)
    settings = ablation_settings(canvas, GROUPS)
    assert len({setting.label for setting in settings}) == len(settings)
    assert {type(setting.value) for setting in settings} == {str, int, float}
    default = pj.preset("polestar", gen_length=64, block_length=8)
    for group in GROUPS[1:]:
        configs = [s.config for s in settings if s.knob == group]
        assert configs.count(default) == 1
        assert len(set(configs)) == len(configs) >= 2
