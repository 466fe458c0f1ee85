"""`info`: its bytes are those of the arrays that decoding allocates."""

import json

import jax
import pytest

import polestar_jax as pj


@pytest.fixture(scope="module")
def loaded(model):
    return pj.load(model)


@pytest.mark.parametrize("policy", ["vanilla", "fast-dllm-dual", "fast-dllm-prefix"])
def test_memory_is_that_of_the_loaded_weights_and_the_decode_state(run, model, loaded, policy):
    lengths = ("--prompt-length", 20, "--gen-length", 16, "--block-length", 8)
    result = run("info", model, "--policy", policy, *lengths, "--batch-size", 3, "--json")
    numbers = json.loads(result.stdout)
    need = numbers["memory"]
    weights = sum(x.nbytes for x in jax.tree.leaves(loaded.params))
    assert need["weights"] == weights == 4 * numbers["parameters"]

    config = pj.preset(policy, gen_length=16, block_length=8)
    state = pj.init_state(loaded, [[3] * 20] * 3, config)
    (plan,) = need["batches"].values()
    assert plan["parts"]["logits of a block"]["device"] == 4 * 3 * 8 * 32
    kept = sum(x.nbytes for x in jax.tree.leaves(state))
    assert plan["device"] == weights + kept + plan["parts"]["logits of a block"]["device"]
    assert plan["host"] == 0


def test_half_precision_halves_weights_and_caches(run, model):
    full, half = (
        json.loads(run("info", model, "--json", *extra).stdout)["memory"]
        for extra in ((), ("--dtype", "bfloat16"))
    )
    assert full["weights"] == 2 * half["weights"]
    keys = [need["batches"]["1"]["parts"]["keys and values"]["device"] for need in (full, half)]
    assert keys[0] == 2 * keys[1] > 0


def test_fields_set_move_bytes_to_the_host(run, model):
    fields = ("--set", "hidden_store=host", "--set", "kv_store=host")
    result = run("info", model, "--policy", "polestar", *fields, "--batch-size", 2, "--json")
    plan = json.loads(result.stdout)["memory"]["batches"]["2"]
    for part in ("keys and values", "hidden inputs"):
        assert plan["parts"][part]["device"] == 0 < plan["parts"][part]["host"]
    assert (
        "rows fetched from the host" in run("info", model, "--policy", "polestar", *fields).stdout
    )


def test_the_table_names_family_sizes_and_a_line_per_batch(run, model):
    text = run("info", model, "--batch-size", 1, "--batch-size", 8).stdout
    for part in ("LLaDA", "5.46 thousand (5,456)", "float32", "batch of 1 ", "batch of 8 "):
        assert part in text


def test_nothing_is_loaded_for_it(run, model, monkeypatch):
    monkeypatch.setattr("jax.numpy.asarray", lambda *a, **k: pytest.fail("allocated an array"))
    assert run("info", model).exit_code == 0


def test_lengths_that_do_not_fit_the_model_are_refused(run, model):
    result = run("info", model, "--prompt-length", 90, "--gen-length", 32)
    assert result.exit_code == 2
    assert "prompt_length 90 and gen_length 32 exceed the model's maximum of 96" in result.stderr


def test_a_length_given_by_set_is_refused_rather_than_ignored(run, model):
    result = run("info", model, "--set", "gen_length=32")
    assert result.exit_code == 2
    assert "set gen_length by its own option" in result.stderr
