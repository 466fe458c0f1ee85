"""The recorded trajectories decoded with the kernels, in Pallas's interpreter: the same tokens.

Every recording of the smallest checkpoint, and some of those with grouped queries and of Dream.
"""

import dataclasses

import numpy as np
import pytest
from decoding import test_recorded_baselines as baselines
from decoding import test_recorded_polestar as polestar
from decoding.helpers import trace_rows
from oracle import golden

import polestar_jax as pj

pytestmark = pytest.mark.slow
OTHERS = (
    "traj_llada_tiny_gqa/dual_thr0.9_B16", "traj_llada_tiny_gqa/prefix_factor1.0_B16",
    "traj_dream_tiny/plain_entropy_s64", "traj_dream_tiny/plain_conf_thr0.9_s32",
    "llada_tiny_gqa_B32_t0.9_te0.5",
)  # fmt: skip


def chosen(groups: list) -> list:
    """Groups of recordings of the smallest checkpoint, and the named others."""
    smallest = [p for p in groups if baselines.INDEX[p.values[0][0]]["checkpoint"] == "llada_tiny"]
    others = [p for p in groups if p.id in OTHERS]
    return [pytest.param(p.values[0], id=p.id) for p in (*smallest, *others)]


@pytest.fixture(scope="module")
def models() -> dict[str, pj.Model]:
    names = ("llada_tiny", "llada_tiny_gqa", "dream_tiny")
    return {name: pj.load(golden.ROOT / name) for name in names}


@pytest.mark.parametrize("names", chosen(baselines.groups(free_running=True)))
def test_kernels_decode_the_recorded_sequence_after_every_pass(models, names):
    recordings = [golden.recording(name) for name in names]
    config = baselines.recorded_config(names[0], implementation="interpret")
    model = models[baselines.INDEX[names[0]]["checkpoint"]]
    result = pj.decode(model, [r["prompt"] for r in recordings], config, trace=True)
    for row, r in enumerate(recordings):
        tokens = trace_rows(result.trace, row)["tokens"]
        np.testing.assert_array_equal(tokens, r["x_after"][:, len(r["prompt"]) :])
        assert result.nfe[row] == int(r["nfe"])


@pytest.mark.parametrize("names", chosen(polestar.groups()))
def test_kernels_decode_every_recorded_pass_and_decision_of_polestar(models, names):
    config = polestar.recorded_config(names[0], capacities=(96,))
    polestar.compare(models, names, dataclasses.replace(config, implementation="interpret"))


@pytest.mark.parametrize("preset", ["fast-dllm-dual", "polestar"])
def test_kernels_decode_cached_dream_as_plain_jax_does(models, preset):
    """No recording shifts exactly over a cache, so the other implementation is the judge."""
    names = ("traj_dream_tiny/dual_conf_thr0.9_P7_B16", "traj_dream_tiny/dual_conf_thr0.9_P61_B16")
    prompts = [golden.recording(f"{name}.npz")["prompt"] for name in names]
    config = pj.preset(preset, gen_length=64, block_length=16, stop_at_eos=False)
    ours, plain = (
        pj.decode(
            models["dream_tiny"], prompts, dataclasses.replace(config, implementation=name),
            trace=True,
        )
        for name in ("interpret", "xla")
    )  # fmt: skip
    np.testing.assert_array_equal(ours.nfe, plain.nfe)
    for row in range(len(prompts)):
        kernels, reference = (trace_rows(r.trace, row)["tokens"] for r in (ours, plain))
        np.testing.assert_array_equal(kernels, reference)
