"""Weight files, whole and broken."""

import json
import pickle
import shutil

import checkpoints
import ml_dtypes
import numpy as np
import pytest

from polestar_jax.convert import reader
from polestar_jax.convert.checkpoint import open_checkpoint
from polestar_jax.convert.reader import DTYPES, read_tensor, resolve_dtype
from polestar_jax.errors import PolestarError
from polestar_jax.models.transformer import parameter_shapes

RAW = checkpoints.SMALL["llada"]
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A sound sharded checkpoint, to be copied and broken."""
    shards = checkpoints.split(checkpoints.random_tensors(RAW), 3)
    return checkpoints.write(tmp_path_factory.mktemp("whole") / "c", RAW, shards)


@pytest.fixture
def directory(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "c")


def complaint(directory) -> str:
    with pytest.raises(PolestarError) as caught:
        open_checkpoint(directory)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def everything(directory, dtype=None) -> dict[str, np.ndarray]:
    checkpoint = open_checkpoint(directory, dtype)
    return {p: checkpoint.read(p) for p in parameter_shapes(checkpoint.config)}


def assert_same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    """Equal names, types and bits."""
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert a[name].tobytes() == b[name].tobytes(), name


def test_sharded_and_single_file_give_the_same_parameters(whole, tmp_path):
    single = checkpoints.write(tmp_path / "s", RAW, [checkpoints.random_tensors(RAW)])
    assert_same(everything(whole), everything(single))


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("wanted", DTYPES)
def test_dtypes_are_converted_as_numpy_does(stored, wanted, tmp_path):
    tensors = checkpoints.random_tensors(RAW, DTYPES[stored])
    got = everything(checkpoints.write(tmp_path / "c", RAW, [tensors]), wanted)
    expected = tensors["model.transformer.blocks.1.ff_out.weight"].astype(DTYPES[wanted]).T
    assert got["layers.1.down"].dtype == DTYPES[wanted]
    np.testing.assert_array_equal(got["layers.1.down"], expected)


@pytest.mark.parametrize("transpose", [False, True])
def test_the_size_of_the_blocks_does_not_matter(transpose, tmp_path, monkeypatch):
    value = np.random.default_rng(0).normal(size=(37, 5)).astype(np.float32)
    checkpoints.write(tmp_path / "c", RAW, [{"x": value}])
    files = reader.open_weights(tmp_path / "c")
    for block_bytes in (1, 20, 100, 37 * 20, 1 << 20):
        monkeypatch.setattr(reader, "BLOCK_BYTES", block_bytes)
        got = read_tensor(files, files.tensors["x"], DTYPES["float32"], transpose)
        np.testing.assert_array_equal(got, value.T if transpose else value)


def test_values_beyond_float16_are_refused_by_name_and_infinities_kept(tmp_path):
    tensors = checkpoints.random_tensors(RAW, ml_dtypes.bfloat16)
    name = "model.transformer.blocks.0.q_proj.weight"
    tensors[name][0, 0] = np.inf
    everything(checkpoints.write(tmp_path / "inf", RAW, [tensors]), "float16")
    tensors[name][0, 0] = 1e5
    with pytest.raises(PolestarError, match=f"{name} holds values beyond the range of float16"):
        everything(checkpoints.write(tmp_path / "big", RAW, [tensors]), "float16")


@pytest.mark.parametrize("bad", ["int8", "float64", "bf16", np.int32, object()])
def test_other_dtypes_are_refused(bad):
    with pytest.raises(PolestarError, match="use bfloat16, float16, float32"):
        resolve_dtype(bad)


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_truncated_file_is_named(kept, directory):
    file = directory / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    assert f"{file} is damaged or truncated" in complaint(directory)


def test_a_file_of_noise_is_named(directory):
    file = directory / "model-00001-of-00003.safetensors"
    file.write_bytes(np.random.default_rng(0).bytes(1000))
    assert f"{file} is damaged or truncated" in complaint(directory)


def test_missing_shards_are_named(directory):
    for number in (1, 3):
        (directory / f"model-0000{number}-of-00003.safetensors").unlink()
    said = complaint(directory)
    assert "lacks 2 of its 3 weight shards: model-00001-of-00003.safetensors, model-00003" in said


def test_shards_without_an_index_are_not_guessed_at(directory):
    (directory / INDEX).unlink()
    assert f"lacks {INDEX}" in complaint(directory)


def test_two_sets_of_weights_are_not_chosen_between(directory):
    shutil.copy(directory / "model-00001-of-00003.safetensors", directory / "model.safetensors")
    assert "has both model.safetensors and model.safetensors.index.json" in complaint(directory)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "must hold a JSON object"),
        ("{}", "has no weight_map"),
        ('{"weight_map": {"x": "../secret.safetensors"}}', "names a file outside its directory"),
    ],
)
def test_a_broken_index_is_one_sentence(content, said, directory):
    (directory / INDEX).write_text(content)
    assert said in complaint(directory)


def test_an_index_that_contradicts_the_shards_is_refused(directory):
    index = json.loads((directory / INDEX).read_text())
    name = "model.transformer.wte.weight"
    others = set(index["weight_map"].values()) - {index["weight_map"][name]}
    index["weight_map"][name] = min(others)
    (directory / INDEX).write_text(json.dumps(index))
    assert f"the index places {name} in {min(others)}" in complaint(directory)


def test_a_directory_without_weights_or_without_configuration_is_one_sentence(tmp_path):
    assert "has no config.json" in complaint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    assert "has no weights" in complaint(tmp_path)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pytorch_files_give_the_same_parameters(dtype, whole, tmp_path):
    torch = pytest.importorskip("torch")
    tensors = checkpoints.random_tensors(RAW, DTYPES[dtype])
    single = checkpoints.write(tmp_path / "safe", RAW, [tensors])
    pickled = tmp_path / "bin"
    pickled.mkdir()
    shutil.copy(single / "config.json", pickled)
    values = {
        n: torch.from_numpy(t.astype(np.float32)).to(getattr(torch, dtype))
        for n, t in tensors.items()
    }
    torch.save(values, pickled / "pytorch_model.bin")
    assert_same(everything(pickled), everything(single))


class Trap:
    """Unpickling this would write a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (self.path.touch, ())


def test_code_in_a_pytorch_file_is_not_run(tmp_path):
    torch = pytest.importorskip("torch")
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    mark, file = tmp_path / "ran", tmp_path / "pytorch_model.bin"
    torch.save({"model.transformer.wte.weight": Trap(mark)}, file)
    assert f"{file} cannot be read as plain tensors" in complaint(tmp_path)
    file.write_bytes(pickle.dumps({"model.transformer.wte.weight": Trap(mark)}))
    assert f"{file} cannot be read as plain tensors" in complaint(tmp_path)
    assert not mark.exists()
