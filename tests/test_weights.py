"""Loading a model, and its plain forward."""

import dataclasses
import json
import os
import re
import shutil

import checkpoints
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from polestar_jax.cli.info import read_model
from polestar_jax.convert import convert
from polestar_jax.errors import PolestarError
from polestar_jax.models.attention import QUERY_TILE
from polestar_jax.models.forward import forward
from polestar_jax.models.transformer import params_to_flat
from polestar_jax.weights import Model, load

RAW = checkpoints.SMALL["llada"]
CONFIG = checkpoints.config(RAW)
CHAT = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.random(CONFIG, jax.random.key(0))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    directory = tmp_path_factory.mktemp("weights") / "Tiny-Base"
    tensors = checkpoints.random_tensors(RAW, ml_dtypes.bfloat16)
    return checkpoints.add_tokenizer(checkpoints.write(directory, RAW, [tensors]), CHAT)


@pytest.fixture(scope="module")
def converted(source):
    return convert(source, source.with_name("converted"))


def complaint(path, dtype=None) -> str:
    with pytest.raises(PolestarError) as caught:
        load(path, dtype)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("which", ["source", "converted"])
def test_a_model_has_the_dtype_asked_for_and_else_the_stored_one(which, request):
    path = request.getfixturevalue(which)
    assert load(path).dtype == jnp.bfloat16
    model = load(str(path), "float32")
    assert model.dtype == jnp.float32
    assert model.config == CONFIG
    assert model.tokenizer.encode("abc") == [0, 1, 2]
    flat = params_to_flat(model.params)
    assert {x.dtype for x in flat.values()} == {jnp.dtype("float32")}
    assert all(isinstance(x, jax.Array) for x in flat.values())


def test_a_base_model_stays_one_through_a_conversion(source, converted):
    assert converted.name == "converted"
    for path in (source, converted):
        assert not load(path).tokenizer.chat
        assert load(path, chat=True).tokenizer.encode_prompt("a") == [36, 0, 37]


@pytest.mark.parametrize("dtype", ["int4", "bf16", "float64"])
def test_an_unusable_dtype_is_one_sentence(dtype, source):
    assert f"dtype '{dtype}' is not supported; use" in complaint(source, dtype)


def test_a_path_that_is_not_a_directory_is_one_sentence(source, tmp_path):
    assert "is not a directory" in complaint(tmp_path / "missing")
    assert "is not a directory" in complaint(source / "config.json")
    assert "is not a directory" in complaint("GSAI-ML/LLaDA-8B-Instruct")


def damage(directory, how: str) -> None:
    """Harm a converted checkpoint in one way."""
    largest = max((directory / "params").rglob("*"), key=lambda p: p.is_file() and p.stat().st_size)
    manifest = directory / "manifest.json"
    match how:
        case "truncated":
            os.truncate(largest, 10)
        case "lost":
            largest.unlink()
        case "no parameters":
            shutil.rmtree(directory / "params")
        case "no configuration":
            (directory / "model_config.json").unlink()
        case "another format":
            manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 99}))
        case "no dtype" | "another dtype":
            values = json.loads(manifest.read_text())
            kept = {name: value for name, value in values.items() if name != "dtype"}
            other = {"dtype": "int4"} if how == "another dtype" else {}
            manifest.write_text(json.dumps(kept | other))
        case "another model":
            file = directory / "model_config.json"
            values = json.loads(file.read_text())
            file.write_text(json.dumps(values | {"mlp_width": values["mlp_width"] + 1}))
        case "unfinished":
            manifest.unlink()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("truncated", "is damaged"),
        ("lost", "is damaged"),
        ("no parameters", "is damaged"),
        ("no configuration", "has no model_config.json"),
        ("another format", "has the format 99, this version reads 1: convert it again"),
        ("no dtype", "names the dtype None, not one of"),
        ("another dtype", "names the dtype 'int4', not one of"),
        ("another model", "is damaged"),
        ("unfinished", "was never finished: convert it again"),
    ],
)
def test_a_damaged_conversion_is_one_sentence(how, said, converted, tmp_path):
    copy = shutil.copytree(converted, tmp_path / "copy")
    damage(copy, how)
    message = complaint(copy)
    assert said in message
    assert str(copy) in message
    if how in ("no configuration", "another format", "no dtype", "another dtype", "unfinished"):
        with pytest.raises(PolestarError, match=re.escape(said)):  # before any weight is read
            read_model(str(copy))


# --- the plain forward ----------------------------------------------------------------------------


def test_a_left_padded_row_gives_what_it_gives_alone(model):
    rng = np.random.default_rng(0)
    length, pads = 12, (0, 1, 7, 11)
    tokens = rng.integers(0, 40, (len(pads), length))
    mask = np.arange(length)[None] >= np.array(pads)[:, None]
    together = np.asarray(model.logits(tokens, mask))
    for row, pad in enumerate(pads[1:3], 1):
        alone = np.asarray(model.logits(tokens[row : row + 1, pad:]))
        np.testing.assert_allclose(together[row, pad:], alone[0], rtol=0, atol=1e-5)
    tokens[~mask] = 39
    np.testing.assert_array_equal(np.asarray(model.logits(tokens, mask))[mask], together[mask])


def test_every_row_sees_every_other(model):
    tokens = np.zeros((1, 6), int)
    before = np.asarray(model.logits(tokens))[0]
    for changed in (0, 5):
        other = tokens.copy()
        other[0, changed] = 7
        difference = np.abs(np.asarray(model.logits(other))[0] - before).max(axis=-1)
        assert (difference > 1e-3).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near_float32_and_gives_float32_logits(dtype, source):
    tokens = np.arange(10)[None]
    wide = np.asarray(load(source, "float32").logits(tokens))
    logits = load(source, dtype).logits(tokens)
    assert logits.dtype == jnp.float32
    # Half precision carries 8 or 11 bits; a few dozen roundings over two layers add up.
    bound = {"bfloat16": 2**-8, "float16": 2**-11}[dtype] * 16 * np.abs(wide).max()
    assert np.abs(np.asarray(logits) - wide).max() < bound


def test_logits_cover_the_legal_tokens_only(model):
    assert CONFIG.embedding_rows > CONFIG.vocab_size
    assert model.logits([[1, 2, 3]]).shape == (1, 3, CONFIG.vocab_size)


def test_a_long_sequence_builds_no_square_of_scores():
    config = dataclasses.replace(CONFIG, max_length=4096, num_layers=1)
    model = Model.random(config, jax.random.key(0), "bfloat16")
    length = 4 * QUERY_TILE + 8
    jaxpr = jax.make_jaxpr(forward, static_argnums=0)(
        config,
        model.params,
        jnp.zeros((1, length), jnp.int32),
        jnp.ones((1, length), bool),
    )
    shapes = [s for s in _shapes(jaxpr.jaxpr) if s]
    tiles = {s[-2] for s in shapes if len(s) == 4 and s[-1] == length}
    # One tile of queries at a time, of every query head that shares a key head.
    assert 1 < max(tiles) <= QUERY_TILE * config.group
    assert not any(sum(n >= length for n in s) > 1 for s in shapes)


def _shapes(jaxpr):
    """Shapes of every value in a program and in the programs inside it."""
    for equation in jaxpr.eqns:
        yield from (v.aval.shape for v in equation.outvars)
        for parameter in equation.params.values():
            for inner in parameter if isinstance(parameter, (tuple, list)) else (parameter,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _shapes(inner)


def test_tiled_attention_equals_the_whole(model):
    """One sequence above the tiling threshold, its second half hidden or cut off."""
    config = dataclasses.replace(CONFIG, max_length=4096)
    long = Model(config, model.params)
    length, pad = 2 * QUERY_TILE + 40, QUERY_TILE
    tokens = np.random.default_rng(0).integers(0, 40, (1, length))
    mask = np.arange(length)[None] >= pad
    tiled = np.asarray(long.logits(tokens, mask))[0, pad:]
    whole = np.asarray(long.logits(tokens[:, pad:]))[0]
    np.testing.assert_allclose(tiled, whole, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("tokens", "mask", "said"),
    [
        ([1, 2], None, r"tokens must be integers \[batch, length\]"),
        (np.zeros((0, 4), int), None, "both at least 1"),
        (np.zeros((1, 0), int), None, "both at least 1"),
        (np.zeros((1, 4)), None, "got float64"),
        ([[1, 40]], None, "token 40 is outside the vocabulary of 40"),
        ([[-1, 4]], None, "token -1 is outside the vocabulary of 40"),
        (np.zeros((1, 65), int), None, "65 tokens are more than the model's maximum of 64"),
        ([[1, 2]], [[1]], r"attention_mask is \[1, 1\], but tokens are \[1, 2\]"),
        ([[1, 2]], [[1, 0]], "only on the left"),
        ([[1, 2, 3]], [[1, 0, 1]], "only on the left"),
        ([[1, 2]], [[0, 0]], "only on the left"),
    ],
)
def test_logits_refuse_what_makes_no_sense(tokens, mask, said, model):
    with pytest.raises(PolestarError, match=said):
        model.logits(tokens, mask)


def test_a_random_model_depends_on_its_key_alone():
    a, b, c = (Model.random(CONFIG, jax.random.key(k), "bfloat16") for k in (1, 1, 2))
    same = jax.tree.map(lambda x, y: bool((x == y).all()), a.params, b.params)
    assert all(jax.tree.leaves(same))
    assert not np.array_equal(np.asarray(a.params["embed"]), np.asarray(c.params["embed"]))
    assert a.dtype == jnp.bfloat16
