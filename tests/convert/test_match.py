"""Which tensors a checkpoint must have: everything amiss is reported at once, by name."""

import checkpoints
import ml_dtypes
import numpy as np
import pytest

from polestar_jax.convert.checkpoint import open_checkpoint
from polestar_jax.convert.names import TABLES, lookup, tensor_name
from polestar_jax.errors import PolestarError
from polestar_jax.models.transformer import parameter_shapes

FAMILIES = tuple(checkpoints.SMALL)


def complaint(directory) -> str:
    """The one sentence that opening raises."""
    with pytest.raises(PolestarError) as caught:
        open_checkpoint(directory)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_tensor_names_and_parameter_names_are_inverse(family):
    config = checkpoints.config(checkpoints.SMALL[family])
    for parameter in parameter_shapes(config):
        assert lookup(family, tensor_name(family, parameter)).parameter == parameter


@pytest.mark.parametrize("family", FAMILIES)
def test_no_tensor_matches_two_rules(family):
    names = [rule.tensor for rule in TABLES[family]]
    targets = [rule.parameter for rule in TABLES[family]]
    assert len(set(names)) == len(names)
    assert len(set(targets)) == len(targets)


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_the_tensors_turned_over(family, tmp_path):
    raw = checkpoints.SMALL[family]
    tensors = checkpoints.random_tensors(raw)
    checkpoint = open_checkpoint(checkpoints.write(tmp_path / "c", raw, [tensors]))
    for parameter, shape in parameter_shapes(checkpoint.config).items():
        stored, got = tensors[tensor_name(family, parameter)], checkpoint.read(parameter)
        assert got.shape == shape
        np.testing.assert_array_equal(got, stored if parameter == "embed" else stored.T)


def test_unknown_missing_duplicate_and_misshapen_tensors_are_reported_together(tmp_path):
    raw = checkpoints.SMALL["llada"]
    tensors = checkpoints.random_tensors(raw)
    block = "model.transformer.blocks.1"
    del tensors[f"{block}.attn_norm.weight"]
    tensors[f"{block}.mystery.weight"] = np.zeros(3, np.float32)
    tensors["model.transformer.blocks.2.q_proj.weight"] = np.zeros((16, 16), np.float32)
    tensors[f"{block}.up_proj.weight"] = np.zeros((3, 5), np.float32)
    tensors[f"{block}.k_proj.weight"] = np.zeros((8, 16), np.int8)
    shards = checkpoints.split(tensors, 2)
    for shard in shards:
        shard["model.transformer.ln_f.weight"] = np.ones(16, np.float32)
    said = complaint(checkpoints.write(tmp_path / "c", raw, shards))
    assert f"1 missing: {block}.attn_norm.weight" in said
    assert f"2 unknown: {block}.mystery.weight, model.transformer.blocks.2.q_proj.weight" in said
    assert "1 duplicate: model.transformer.ln_f.weight" in said
    assert f"1 of the wrong shape: {block}.up_proj.weight [3, 5] instead of [24, 16]" in said
    assert f"{block}.k_proj.weight (I8)" in said


def test_rotary_buffers_of_old_checkpoints_are_passed_over(tmp_path):
    raw = checkpoints.SMALL["dream"]
    tensors = checkpoints.random_tensors(raw)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)
    open_checkpoint(checkpoints.write(tmp_path / "c", raw, [tensors]))


def test_weights_of_the_other_family_are_called_that(tmp_path):
    tensors = checkpoints.random_tensors(checkpoints.SMALL["dream"])
    directory = checkpoints.write(tmp_path / "c", checkpoints.SMALL["llada"], [tensors])
    assert "config.json says llada, but the tensors are named like those of a dream" in complaint(
        directory
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "llama"}, "model_type 'llama' is not supported"),
        ({"block_type": "sequential"}, "block_type = 'sequential' is not supported"),
        ({"n_layers": None}, "n_layers"),
        ({"vocab_size": 100}, "embedding_rows"),
    ],
)
def test_a_configuration_that_is_not_ours_is_one_sentence(change, said, tmp_path):
    raw = checkpoints.SMALL["llada"] | change
    raw = {k: v for k, v in raw.items() if v is not None}
    assert said in complaint(checkpoints.write(tmp_path / "c", raw, [{"x": np.zeros(1)}]))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tied_head_needs_no_tensor_and_an_untied_one_does(family, tmp_path):
    key = {"llada": "weight_tying", "dream": "tie_word_embeddings"}[family]
    tied = checkpoints.SMALL[family] | {key: True}
    tensors = checkpoints.random_tensors(tied)
    checkpoint = open_checkpoint(checkpoints.write(tmp_path / "tied", tied, [tensors]))
    assert "head" not in checkpoint.entries
    untied = tied | {key: False}
    said = complaint(checkpoints.write(tmp_path / "untied", untied, [tensors]))
    assert f"1 missing: {tensor_name(family, 'head')}" in said


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_stored_beside_a_tied_embedding_must_equal_it(family, tmp_path):
    key = {"llada": "weight_tying", "dream": "tie_word_embeddings"}[family]
    raw = checkpoints.SMALL[family] | {key: True}
    tensors = checkpoints.random_tensors(raw)
    head, embed = tensor_name(family, "head"), tensor_name(family, "embed")
    tensors[head] = tensors[embed].copy()
    same = open_checkpoint(checkpoints.write(tmp_path / "same", raw, [tensors]))
    assert "head" not in same.entries
    tensors[head][-1, -1] += 1
    said = complaint(checkpoints.write(tmp_path / "other", raw, [tensors]))
    assert f"config.json ties the head to the embedding, but {head} differs" in said


def test_the_kept_dtype_is_the_stored_one_or_what_config_json_says_of_a_mixture(tmp_path):
    raw = checkpoints.SMALL["llada"]
    half = checkpoints.random_tensors(raw, ml_dtypes.bfloat16)
    assert open_checkpoint(checkpoints.write(tmp_path / "a", raw, [half])).dtype == "bfloat16"
    mixed = half | {"model.transformer.ln_f.weight": np.ones(16, np.float32)}
    said = complaint(checkpoints.write(tmp_path / "b", raw, [mixed]))
    assert "mixes tensors of bfloat16 and float32" in said
    assert open_checkpoint(tmp_path / "b", "float16").dtype == np.float16
    for key in ("dtype", "torch_dtype"):
        named = raw | {key: "float32"}
        assert open_checkpoint(checkpoints.write(tmp_path / key, named, [mixed])).dtype == "float32"
