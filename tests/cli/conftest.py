"""A tiny random model as a Hugging Face directory, and the command line run in-process."""

import json

import jax
import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from polestar_jax.cli import cli
from polestar_jax.convert.names import tensor_name
from polestar_jax.models.config import ModelConfig
from polestar_jax.models.transformer import random_flat

WORDS = ["<eos>", "<mask>", *(f"w{i}" for i in range(30))]

CONFIG = {
    "model_type": "llada", "vocab_size": 32, "d_model": 16, "n_layers": 2, "n_heads": 2,
    "mlp_hidden_size": 24, "max_sequence_length": 96, "weight_tying": False,
    "mask_token_id": 1, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip


def write_model(directory, tokenizer=True, key=0):
    directory.mkdir()
    config = ModelConfig.from_hf(CONFIG)
    flat = random_flat(config, jax.random.key(key))
    tensors = {
        tensor_name("llada", name): np.ascontiguousarray(x if name == "embed" else x.T)
        for name, x in ((name, np.asarray(x)) for name, x in flat.items())
    }
    # Random norms, so that the checkpoints of two keys have two fingerprints.
    rng = np.random.default_rng(key)
    for name, x in tensors.items():
        if x.ndim == 1:
            tensors[name] = rng.uniform(0.5, 1.5, x.shape).astype(np.float32)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    if tokenizer:
        words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="w29"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        words.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def make_model():
    """make_model(directory, tokenizer=True, key=0) -> the directory of a new model."""
    return write_model


@pytest.fixture
def run():
    """run("generate", ...) -> click's Result; an unexpected exception fails the test."""

    def call(command, *arguments, **settings):
        if command in ("generate", "demo"):
            arguments = (*arguments, "--compilation-cache", "off")
        words = [command, *map(str, arguments)]
        result = CliRunner().invoke(cli, words, catch_exceptions=False, **settings)
        assert "Traceback" not in result.output
        return result

    return call
