"""The memory plan against what is allocated; what fails without host memory, and how."""

import dataclasses
import json
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest
from decoding.helpers import model_pair, random_prompts, small_config

import polestar_jax as pj
from polestar_jax.decoding import decode as decode_module
from polestar_jax.memory import FETCHED, HIDDEN, KEYS, LOGITS, WEIGHTS
from polestar_jax.store import place
from tests.store.test_decoding import BOTH, FOUR_BITS, make_config
from tests.store.test_decoding import HIDDEN as HIDDEN_ON_HOST

PLANNED = {
    "polestar": {},
    "four bits": FOUR_BITS,
    "hidden on the host": HIDDEN_ON_HOST,
    "all on the host": BOTH | FOUR_BITS,
}


def live_bytes() -> dict[str, int]:
    """Bytes of all arrays that exist, by memory kind."""
    total = {"device": 0, "pinned_host": 0}
    for array in jax.live_arrays():
        total[array.sharding.memory_kind] += array.nbytes
    return total


@pytest.mark.parametrize("stores", PLANNED.values(), ids=PLANNED)
def test_the_plan_is_what_a_state_allocates_on_device_and_host(stores):
    model, config = model_pair("llada", 0)[0], make_config(**stores)
    plan = pj.memory_plan(model, config, 3, 8)
    before = live_bytes()
    state = pj.init_state(model, random_prompts(0, [3, 8, 1]), config)
    jax.block_until_ready(state)
    after = live_bytes()
    kept = plan.device - sum(plan.part(name).device for name in (WEIGHTS, LOGITS, FETCHED))
    assert after["device"] - before["device"] == pytest.approx(kept, rel=0.05)
    assert after["pinned_host"] - before["pinned_host"] == pytest.approx(plan.host, rel=0.05)
    assert plan.part(WEIGHTS).device == sum(x.nbytes for x in jax.tree.leaves(model.params))
    del state


def test_measured_rows_in_four_bits_on_the_host_leave_only_their_centroids_on_the_device():
    config = small_config("llada", width=128, max_length=512)
    model = pj.Model.random(config, jax.random.key(0), "bfloat16")
    prompts = random_prompts(0, [3, 8])
    lengths = {"gen_length": 128, "block_length": 32, "prompt_bucket": 8}

    def growth(**stores):
        """Bytes that a state adds by memory kind, and its stored rows."""
        before = live_bytes()
        state = pj.init_state(model, prompts, pj.preset("polestar", **lengths, **stores))
        after = live_bytes()
        return {kind: after[kind] - before[kind] for kind in after}, state.cache.hidden

    plain, rows = growth()
    away, stored = growth(**HIDDEN_ON_HOST, **FOUR_BITS)
    whole = sum(store.data.nbytes for store in rows)
    assert whole == 2 * 128 * 128 * config.num_layers * 2  # batch, window, width, layers, bfloat16
    assert plain["pinned_host"] == 0
    assert 0 < away["pinned_host"] <= 0.30 * whole
    centroids = sum(store.base.nbytes for store in stored)
    assert centroids == 2 * 8 * 128 * config.num_layers * 4
    assert away["device"] == plain["device"] - whole + centroids


def test_four_bits_on_the_host_leave_no_hidden_row_on_the_device():
    """LLaDA-8B at 1,024 rows: two layers on their way, and 0.30 of the bfloat16 store's bytes."""
    wide = small_config(
        "llada", width=4096, num_layers=32, num_heads=32, num_kv_heads=32, head_dim=128,
        mlp_width=12288, vocab_size=126464, embedding_rows=126464, max_length=4096,
    )  # fmt: skip
    config = pj.preset("polestar", gen_length=256)
    away = pj.preset("polestar", gen_length=256, hidden_store="host", hidden_dtype="nvfp4")
    plain = pj.memory_plan(wide, config, 4, 768)
    plan = pj.memory_plan(wide, away, 4, 768)
    full = plain.part(HIDDEN)
    assert full.device == 4 * 128 * 4096 * 32 * 2
    assert plan.part(HIDDEN).device == 0
    assert plan.host == plan.part(HIDDEN).host <= 0.30 * full.device
    assert plan.part(FETCHED).device == plan.host // 16
    # Besides, the centroids that the rows are stored relative to.
    extra = plan.part("centroids, labels, counts").device
    extra -= plain.part("centroids, labels, counts").device
    assert extra == 4 * 8 * 4096 * 4 * 32


def test_keys_and_values_on_the_host_leave_the_device():
    config = small_config("llada")
    here = pj.memory_plan(config, make_config(), 2, 8)
    away = pj.memory_plan(config, make_config(kv_store="host"), 2, 8)
    assert away.part(KEYS) == dataclasses.replace(
        here.part(KEYS), device=0, host=here.part(KEYS).device
    )
    assert away.part(FETCHED).device == away.host  # two layers of two


def test_a_plan_prints_its_parts_and_loads_as_json():
    plan = pj.memory_plan(small_config("llada"), make_config(**BOTH), 2, 8)
    text = str(plan)
    for part in plan.parts:
        assert part.name in text
    assert json.loads(json.dumps(plan.to_dict()))["host"] == plan.host > 0


@pytest.mark.parametrize(("batch", "length"), [(0, 8), (1, -1)])
def test_impossible_sizes_are_refused(batch, length):
    with pytest.raises(pj.PolestarError, match="must be a whole number of at least"):
        pj.memory_plan(small_config("llada"), make_config(), batch, length)


@pytest.fixture(params=["other memories", "no memories"])
def without_host_memory(monkeypatch, request):
    """A back end whose devices have no pinned host memory, or do not know of memories at all."""

    class Memory:
        kind = "device"

    class Device:
        def addressable_memories(self):
            if request.param == "no memories":
                raise NotImplementedError
            return [Memory()]

    monkeypatch.setattr(place.jax, "local_devices", lambda: [Device()])


@pytest.mark.parametrize("field", ["hidden_store", "kv_store"])
def test_a_back_end_without_host_memory_is_refused_at_configuration_time(
    without_host_memory, field
):
    with pytest.raises(pj.PolestarError) as error:
        pj.preset("polestar", **{field: "host"})
    assert str(error.value) == (
        f"{field}='host' needs pinned host memory, which the back end 'cpu' does not have; use "
        f"{field}='device', or host_fallback=True to stay on the device wherever that is so"
    )


def test_rows_stay_on_the_device_only_if_the_fallback_was_asked_for(without_host_memory):
    config = make_config(**BOTH, host_fallback=True)
    plan = pj.memory_plan(small_config("llada"), config, 2, 8)
    assert plan.host == 0
    assert plan.part(HIDDEN).device > 0


def test_with_host_memory_the_fallback_changes_nothing():
    plan = pj.memory_plan(small_config("llada"), make_config(**BOTH, host_fallback=True), 2, 8)
    assert plan.part(HIDDEN).device == 0 < plan.part(HIDDEN).host


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_store": "disk"}, "hidden_store must be one of device, host, got 'disk'"),
        ({"kv_store": None}, "kv_store must be one of device, host, got None"),
        ({"hidden_dtype": "int8"}, "hidden_dtype must be None .* or 'nvfp4', got 'int8'"),
        ({"host_fallback": "yes"}, "host_fallback must be True or False, got 'yes'"),
    ],
)
def test_unknown_choices_are_refused(fields, message):
    with pytest.raises(pj.PolestarError, match=message):
        pj.PolestarCache(**fields)


def test_a_model_too_narrow_for_groups_of_sixteen_is_refused_before_anything_is_made():
    with pytest.raises(pj.PolestarError, match="multiple of 16, got 24"):
        pj.memory_plan(small_config("llada", width=24), make_config(**FOUR_BITS), 1, 8)


def test_other_errors_of_the_runtime_pass_unchanged(monkeypatch):
    def fail(*args, **kwargs):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    monkeypatch.setattr(decode_module, "start_program", fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        pj.decode(model_pair("llada", 0)[0], [np.array([1])], make_config())


def test_exhausted_memory_gives_the_plan_and_the_remedy():
    """In a process that may not have the memory: the allocation really fails."""
    script = textwrap.dedent(
        """
        import resource, sys
        import numpy as np
        import jax
        import polestar_jax as pj
        from polestar_jax.models.transformer import params_from_flat, random_flat

        shape = dict(
            family="llada", vocab_size=40, embedding_rows=40, width=64, num_layers=2, num_heads=8,
            num_kv_heads=8, head_dim=64, mlp_width=16, rope_theta=1e4, norm_eps=1e-5,
            max_length=100_000, qkv_bias=False, tied_head=False, shift_logits=False,
            mask_token=38, eos_token=39, pad_token=39,
        )
        config = pj.ModelConfig(**shape)
        model = pj.Model(config, params_from_flat(config, random_flat(config, jax.random.key(0))))
        decode = pj.preset("polestar", gen_length=32, kv_store="host", hidden_store="host")
        jax.block_until_ready(jax.numpy.ones(3) + 1)
        # Address space for the program, not for 24 GB of keys and values.
        held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + 4 * 2**30,) * 2)
        try:
            pj.init_state(model, np.ones((64, 32768), np.int32), decode)
        except pj.PolestarError as error:
            print(error)
            sys.exit(7)
        """
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 7, result.stderr[-2000:]
    first, *table = result.stdout.splitlines()
    assert first.startswith("memory ran out decoding 64 sequences of 32800 positions, which need")
    assert "in pinned host memory" in first
    assert "use a smaller batch" in first
    assert "hidden_dtype='nvfp4'" in first
    assert "kv_store='device' if the host is full" in first
    assert any(line.startswith("keys and values") for line in table)
