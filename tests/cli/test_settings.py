"""Options become exactly the configuration they name."""

import jax
import pytest

import polestar_jax as pj
from polestar_jax.cli import options
from polestar_jax.cli.settings import build_config, fingerprint, parse_assignments, policies
from polestar_jax.decoding import cache, commit


def test_values_are_json_python_words_or_text():
    given = ["threshold=0.8", "steps=16", "a=true", "b=False", "c=null", "d=None", "e=x=y", "f-g=1"]
    expected = {
        "threshold": 0.8, "steps": 16, "a": True, "b": False, "c": None, "d": None, "e": "x=y",
        "f_g": 1,
    }  # fmt: skip
    assert parse_assignments(given) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["threshold"], "wants FIELD=VALUE, got 'threshold'"),
        (["=3"], "wants FIELD=VALUE"),
        (["a=1", "a=2"], "gives a twice"),
        (["a=[1]"], "wants one number, word or text"),
    ],
)
def test_an_assignment_that_is_none_is_refused(given, message):
    with pytest.raises(pj.PolestarError, match=message):
        parse_assignments(given)


def test_a_preset_with_fields_is_the_presets_own():
    fields = {"gen_length": 64, "threshold": 0.8, "suppress_eos": True}
    assert build_config("fast-dllm-dual", None, None, fields) == pj.preset(
        "fast-dllm-dual", **fields
    )


def test_policies_are_exchanged_by_name():
    config = build_config("vanilla", "prefix", "factor", {"factor": 2.0})
    assert config.cache == pj.PrefixCache()
    assert config.commit == pj.FactorCommit(factor=2.0)


def test_every_exported_policy_has_a_name():
    assert {"none", "prefix", "dual"} <= set(policies(cache))
    assert {"fixed", "threshold", "factor"} <= set(policies(commit))
    assert "" not in policies(cache)
    for name in policies(cache):
        assert isinstance(build_config("vanilla", name, None, {}).cache, pj.CachePolicy)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nonesuch", None, None, {}), "unknown preset 'nonesuch'; known: vanilla"),
        (("vanilla", "dua", None, {}), "unknown cache policy 'dua'; known: dual"),
        (("vanilla", None, "all", {}), "unknown commit policy 'all'; known: .*threshold"),
        (("vanilla", None, None, {"threshold": 0.9}), "unknown field 'threshold'"),
        (("vanilla", None, None, {"cache": "dual"}), "by --cache NAME, not by --set"),
    ],
)
def test_unknown_names_are_refused_with_the_known_ones(arguments, message):
    with pytest.raises(pj.PolestarError, match=message):
        build_config(*arguments)


def test_checkpoints_of_one_shape_have_different_fingerprints(tmp_path, make_model):
    models = [make_model(tmp_path / str(key), key=key) for key in (0, 1)]
    first, again, second = (fingerprint(pj.load(m)) for m in (models[0], *models))
    assert first == again != second


@pytest.mark.parametrize("choice", ["off", None, "named"])
def test_the_compilation_cache_is_where_it_was_asked_for(tmp_path, monkeypatch, choice):
    updates = {}
    monkeypatch.setattr(jax.config, "update", lambda name, value: updates.update({name: value}))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    options.use_compilation_cache(str(tmp_path / choice) if choice == "named" else choice)
    if choice == "off":
        assert updates == {"jax_enable_compilation_cache": False}
    else:
        folder = tmp_path / "named" if choice else tmp_path / "user" / "polestar-jax"
        assert updates["jax_compilation_cache_dir"] == str(folder)
        assert folder.is_dir()


def test_a_cache_chosen_by_the_environment_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(jax.config, "update", lambda name, value: pytest.fail(name))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    options.use_compilation_cache(None)


def test_a_named_cache_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(pj.PolestarError, match="cannot make the directory"):
        options.use_compilation_cache(str(tmp_path / "file" / "inside"))
