"""A damaged `config.json` is refused in one sentence, before anything is built from it."""

import importlib.resources
import json

import pytest

import polestar_jax as pj
from polestar_jax.errors import PolestarError
from polestar_jax.models.config import ModelConfig

RELEASED = json.loads(
    (importlib.resources.files(pj) / "assets" / "embedded" / "config.json").read_text()
)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("n_layers", "4", "num_layers must be a whole number of at least 1, got '4'"),
        ("n_layers", None, "num_layers must be a whole number"),
        ("n_heads", 0, "holds a value that cannot be used"),
        ("d_model", "x", "holds a value that cannot be used"),
        ("embedding_size", "364", "embedding_rows must be a whole number"),
        ("max_sequence_length", None, "max_length must be a whole number"),
        ("mask_token_id", None, "mask_token must be a whole number"),
        ("eos_token_id", [1, 2], "eos_token must be a whole number"),
        ("rope_theta", "a", "holds a value that cannot be used"),
        ("rope_theta", -1, "rope_theta must be a positive number, got -1.0"),
        ("rms_norm_eps", float("nan"), "norm_eps must be a positive number, got nan"),
    ],
)
def test_value_of_the_wrong_kind_is_refused_by_name(field, value, says):
    ModelConfig.from_hf(RELEASED)
    with pytest.raises(PolestarError, match=says):
        ModelConfig.from_hf(RELEASED | {field: value})


def test_incomplete_converted_configuration_is_refused():
    values = ModelConfig.from_hf(RELEASED).to_dict()
    assert ModelConfig.from_dict(values) == ModelConfig.from_hf(RELEASED)
    del values["width"]
    with pytest.raises(PolestarError, match="incomplete .*'width'.*convert the checkpoint again"):
        ModelConfig.from_dict(values)
