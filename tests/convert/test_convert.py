"""A conversion gives exactly the source's parameters, or leaves nothing behind."""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import checkpoints
import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

import polestar_jax.convert as package
from polestar_jax.convert import convert, hub, writer
from polestar_jax.convert.__main__ import command
from polestar_jax.errors import PolestarError
from polestar_jax.models.transformer import params_to_flat
from polestar_jax.weights import load

GOLDEN = Path(__file__).parents[1] / "golden"
RAW = checkpoints.SMALL["llada"] | {"n_layers": 1}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A small bfloat16 LLaDA in two shards, with a tokenizer."""
    tensors = checkpoints.random_tensors(RAW, ml_dtypes.bfloat16)
    directory = tmp_path_factory.mktemp("source") / "tiny"
    checkpoints.write(directory, RAW, checkpoints.split(tensors, 2))
    return checkpoints.add_tokenizer(directory)


@pytest.fixture(scope="module")
def converted(source) -> Path:
    return convert(source, source.with_name("converted"))


def assert_same_parameters(a, b) -> None:
    """Equal names, types and bits."""
    flat_a, flat_b = params_to_flat(a.params), params_to_flat(b.params)
    assert flat_a.keys() == flat_b.keys()
    for name, value in flat_a.items():
        assert value.dtype == flat_b[name].dtype
        assert np.asarray(value).tobytes() == np.asarray(flat_b[name]).tobytes(), name


@pytest.mark.parametrize("name", ["llada_tiny_gqa", "dream_tiny"])
def test_a_converted_checkpoint_loads_bit_for_bit_like_its_source(name, tmp_path):
    there = load(convert(GOLDEN / name, tmp_path / "out"))
    here = load(GOLDEN / name)
    assert there.config == here.config
    assert_same_parameters(there, here)


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16", "float32"])
def test_a_dtype_at_loading_is_the_same_converted_or_not(dtype, source, converted):
    assert_same_parameters(load(converted, dtype), load(source, dtype))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_dtype_at_conversion_is_what_the_source_gives_at_loading(dtype, source, tmp_path):
    there = load(convert(source, tmp_path / "out", dtype))
    assert there.dtype == dtype
    assert_same_parameters(there, load(source, dtype))


def test_narrowing_at_loading_rounds_alike_converted_or_not(tmp_path):
    directory = checkpoints.write(tmp_path / "wide", RAW, [checkpoints.random_tensors(RAW)])
    out = convert(directory, tmp_path / "out")
    for dtype in ("bfloat16", "float16"):
        assert_same_parameters(load(out, dtype), load(directory, dtype))


def test_float16_too_narrow_for_a_value_is_refused_converted_or_not(tmp_path):
    tensors = checkpoints.random_tensors(RAW, ml_dtypes.bfloat16)
    tensors["model.transformer.blocks.0.up_proj.weight"][0, 0] = 1e5
    directory = checkpoints.write(tmp_path / "wide", RAW, [tensors])
    for path, name in (
        (directory, "model.transformer.blocks.0.up_proj.weight"),
        (convert(directory, tmp_path / "out"), "layers.0.up"),
    ):
        with pytest.raises(PolestarError, match=f"{name} holds values beyond the range of float16"):
            load(path, "float16")


def test_the_parameters_are_an_ordinary_orbax_checkpoint(source, converted):
    import orbax.checkpoint as ocp

    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.restore(converted / "params")
    flat = params_to_flat(load(source).params)
    assert tree.keys() == flat.keys()
    np.testing.assert_array_equal(tree["layers.0.q"], np.asarray(flat["layers.0.q"]))


def test_tokenizer_and_manifest_come_along(source, converted):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (converted / name).read_bytes() == (source / name).read_bytes()
    assert load(converted).tokenizer.encode("ab") == load(source).tokenizer.encode("ab")
    manifest = json.loads((converted / "manifest.json").read_text())
    assert manifest["source"] == str(source.resolve())
    assert (manifest["family"], manifest["dtype"]) == ("llada", "bfloat16")
    assert set(manifest["versions"]) >= {"polestar-jax", "jax", "orbax-checkpoint"}
    assert manifest["sha256"] == {
        f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in source.glob("*.safetensors")
    }


# --- all or nothing -------------------------------------------------------------------------------


def complaint(*args, **kwargs) -> str:
    with pytest.raises(PolestarError) as caught:
        convert(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_existing_destination_is_left_alone(source, tmp_path):
    for dst in (tmp_path / "directory", tmp_path / "file"):
        dst.mkdir() if dst.name == "directory" else dst.write_text("mine")
        assert f"{dst} exists already" in complaint(source, dst)
    assert (tmp_path / "file").read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["directory", "file"]


def test_a_destination_without_a_parent_is_one_sentence(source, tmp_path):
    assert "does not exist; create it first" in complaint(source, tmp_path / "no" / "out")


@pytest.mark.parametrize("break_it", ["truncate", "unlink"])
def test_a_broken_source_leaves_nothing(break_it, source, tmp_path):
    broken = shutil.copytree(source, tmp_path / "broken")
    file = broken / "model-00002-of-00002.safetensors"
    os.truncate(file, 50) if break_it == "truncate" else file.unlink()
    assert file.name in complaint(broken, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["broken"]


def test_too_little_space_is_said_before_writing(source, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda path: usage)
    assert "GiB free, but the checkpoint needs" in complaint(source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        ValueError("RESOURCE_EXHAUSTED: Failed to write 9328 bytes: No space left on device"),
    ],
)
def test_a_disk_that_fills_up_leaves_nothing(error, source, tmp_path, monkeypatch):
    def fail(*args):
        raise error

    monkeypatch.setattr(package, "write_json", fail)  # after the parameters
    said = complaint(source, tmp_path / "out")
    assert said == f"cannot write {tmp_path / 'out'}: No space left on device"
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_really_full_leaves_nothing(tmp_path):
    script = f"""
import os, polestar_jax.convert as package
package.check_space = lambda *a: None
try:
    package.convert({str(GOLDEN / "llada_tiny")!r}, {str(tmp_path / "out")!r})
except package.writer.PolestarError as error:
    print(error, os.listdir({str(tmp_path)!r}))
"""
    mount = f"mount -t tmpfs -o size=400k tmpfs {tmp_path} && exec {sys.executable} -c '$SCRIPT'"
    unshare = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    try:
        subprocess.run([*unshare, f"mount -t tmpfs tmpfs {tmp_path}"], check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this system does not let a user mount a file system")
    mount = mount.replace("'$SCRIPT'", '"$SCRIPT"')
    done = subprocess.run(
        [*unshare, mount],
        env=os.environ | {"SCRIPT": script},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"cannot write {tmp_path / 'out'}: No space left on device []\n"


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interruption_leaves_nothing(error, source, tmp_path, monkeypatch):
    def fail(*args):
        raise error

    monkeypatch.setattr(package, "write_json", fail)
    with pytest.raises(error):
        convert(source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_killed_conversion_does_not_look_finished_and_a_rerun_cleans_up(source, tmp_path):
    script = f"""
import os, signal, polestar_jax.convert as package
package.write_json = lambda *a: os.kill(os.getpid(), signal.SIGKILL)
package.convert({str(source)!r}, {str(tmp_path / "out")!r})
"""
    done = subprocess.run([sys.executable, "-c", script], check=False)
    assert done.returncode == -9
    assert [p.name for p in tmp_path.iterdir()] == ["out.partial"]
    with pytest.raises(PolestarError, match="was never finished: convert it again"):
        load(tmp_path / "out.partial")
    (tmp_path / "out.partial" / "stray").write_text("left over")
    assert_same_parameters(load(convert(source, tmp_path / "out")), load(source))
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert not (tmp_path / "out" / "stray").exists()


def test_two_conversions_into_one_place_do_not_disturb_each_other(source, tmp_path):
    with writer.finished_or_nothing(tmp_path / "out") as partial:
        (partial / "first").write_text("at work")
        assert "another conversion is writing" in complaint(source, tmp_path / "out")
        assert (partial / "first").exists()
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["first"]


def test_a_destination_that_appears_meanwhile_is_not_overwritten(tmp_path):
    with (
        pytest.raises(PolestarError, match="exists already"),
        writer.finished_or_nothing(tmp_path / "out"),
    ):
        (tmp_path / "out").mkdir()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


# --- the hub --------------------------------------------------------------------------------------


def test_a_repository_is_downloaded_as_data_only_and_remembered(source, tmp_path, monkeypatch):
    import huggingface_hub

    asked = []
    snapshot = shutil.copytree(source, tmp_path / "0123abc")

    def download(repository, revision, allow_patterns):
        asked.append((repository, revision))
        assert not [p for p in allow_patterns if p.endswith(("*", "py", "bin"))]
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    out = convert("owner/Some-Model-Base", tmp_path / "out", revision="main")
    assert asked == [("owner/Some-Model-Base", "main")]
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["source"], manifest["revision"]) == ("owner/Some-Model-Base", "0123abc")


def test_being_offline_is_one_sentence(tmp_path, monkeypatch):
    import huggingface_hub

    def download(*args, **kwargs):
        raise huggingface_hub.errors.LocalEntryNotFoundError("long\ntrace")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    said = complaint("owner/model", tmp_path / "out")
    assert said == (
        "cannot download owner/model: there is no such directory here, and the hub cannot be "
        "reached to download it"
    )


def test_the_real_hub_library_offline_is_one_sentence(tmp_path):
    script = f"""
import polestar_jax.convert as package
try:
    package.convert("no-such-owner/no-such-model", {str(tmp_path / "out")!r})
except package.writer.PolestarError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("cannot download no-such-owner/no-such-model: ")
    assert done.stdout.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("src", "revision", "said"),
    [
        ("no/such/place", None, "no/such/place does not exist"),
        ("./missing", None, "./missing does not exist"),
        (str(GOLDEN / "README.md"), None, "is a file; give the directory"),
        (str(GOLDEN / "llada_tiny"), "main", "revision 'main' needs a hub repository"),
    ],
)
def test_a_source_that_is_not_there_is_one_sentence(src, revision, said, tmp_path):
    assert said in complaint(src, tmp_path / "out", revision=revision)
    assert hub.resolve(GOLDEN / "llada_tiny").directory == GOLDEN / "llada_tiny"


# --- the command ----------------------------------------------------------------------------------


def test_the_command_converts_and_shows_progress(source, tmp_path):
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-m", "polestar_jax.convert", str(source), str(out), "--dtype", "float16"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert done.stdout == f"wrote {out}\n"
    assert "converting: 100%" in done.stderr
    assert_same_parameters(load(out), load(source, "float16"))


def test_the_command_reports_a_mistake_on_one_line_with_exit_code_2(source, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "polestar_jax.convert", str(source), str(tmp_path), "--quiet"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert (
        done.stderr
        == f"error: {tmp_path} exists already; remove it or choose another destination\n"
    )
    assert CliRunner().invoke(command, [str(source), "x", "--dtype", "int8"]).exit_code == 2


# --- memory ---------------------------------------------------------------------------------------

MEASURE = """
import resource, sys, time
from polestar_jax.{module} import {function}
start = time.time()
{function}(*sys.argv[1:])
try:
    # Unlike getrusage, this does not start from the size of the process that started this one.
    status = open("/proc/self/status").read()
    peak = int(status.split("VmHWM:")[1].split()[0])
except (OSError, IndexError):
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(peak * 1024, time.time() - start)
"""


def peak_memory(module: str, function: str, *args: Path) -> int:
    """Most resident bytes of a process that calls the function."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE.format(module=module, function=function), *map(str, args)],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout.split()[0])


@pytest.mark.slow
def test_memory_stays_near_the_largest_tensor_whatever_the_size(tmp_path):
    raw = checkpoints.SMALL["llada"] | {
        "vocab_size": 65536, "embedding_size": 65536, "d_model": 2048, "n_layers": 15,
        "n_heads": 16, "n_kv_heads": 16, "mlp_hidden_size": 11008,
    }  # fmt: skip
    size = checkpoints.write_large(tmp_path / "large", raw, shard_bytes=900 << 20)
    largest = 65536 * 2048 * 2
    assert size > 3e9
    try:
        peak = peak_memory("convert", "convert", tmp_path / "large", tmp_path / "out")
        assert peak < 2 * largest + (1 << 30)
        shutil.rmtree(tmp_path / "large")
        peak = peak_memory("weights", "load", tmp_path / "out")
        assert peak < size + 2 * largest + (1 << 30)  # the parameters once, not twice
    finally:
        for name in ("large", "out"):
            shutil.rmtree(tmp_path / name, ignore_errors=True)
