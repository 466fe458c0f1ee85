"""What holds for every test: the CPU, no silent change of type or rank, a budget of time."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

from polestar_jax.kernels import aot

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Slow tests of many cases of one kind: continuous integration runs every n-th case, so that its
# second stage stays within its time; `make test-exhaustive` runs all. 0: none of them.
EVERY = {
    "test_baselines_reproduce_the_recording": 8,
    "test_each_row_of_a_batch_equals_the_oracle_alone_after_every_pass": 9,
    "test_same_sequence_after_every_pass_and_same_nfe": 4,
    "test_cached_dream_with_the_shift_inside_the_block_given_the_recorded_sequences": 4,
    "test_polestar_reproduces_the_recording": 7,
    "test_polestar_agrees_with_the_release_given_its_decisions": 3,
    "test_decoded_freely_every_pass_decision_and_number_is_the_recorded_one": 4,
    "test_drift_scores_and_confidences_given_the_recorded_decisions": 4,
    "test_each_row_equals_the_oracle_in_every_pass": 4,
    "test_host_equals_device_bit_for_bit": 5,
    "test_stepwise_equals_fused_with_rows_on_the_host": 4,
    "test_attention_of_rows_matches_the_oracle_at_every_named_shape": 10,
    "test_outputs_match_the_oracle_at_every_named_shape": 10,
    "test_rows_are_moved_exactly_at_every_named_shape": 10,
    "test_rows_are_stored_by_the_formulas_at_every_named_shape": 10,
    "test_two_layers_of_every_policy_are_without_fault": 6,
    "test_kernels_decode_the_recorded_sequence_after_every_pass": 5,
    "test_kernels_decode_every_recorded_pass_and_decision_of_polestar": 11,
    "test_kernels_decode_cached_dream_as_plain_jax_does": 2,
    "test_rows_are_moved_and_attended_at_many_shapes": 0,
    "test_outputs_match_the_oracle_at_many_shapes": 0,
    "test_rows_are_stored_by_the_formulas_at_many_shapes": 0,
    # Ratios of times: only meaningful on a machine that does nothing else.
    "test_a_pass_costs_at_most_a_quarter_more_than_its_matrix_products": 0,
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the slow cases beyond the budget as exhaustive; skip what this environment lacks."""
    seen: dict[str, int] = {}
    lacking = {
        "gpu_compiler": aot.available,
        "newest_jax": lambda: "needs JAX 0.12" if jax.__version_info__ < (0, 12) else None,
    }
    for marker, why in lacking.items():
        marked = [item for item in items if item.get_closest_marker(marker)]
        if marked and (reason := why()):
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))
    for item in items:
        name = getattr(item, "originalname", item.name)
        if name not in EVERY or item.get_closest_marker("slow") is None:
            continue
        key = f"{item.path}::{name}"
        number, every = seen.get(key, 0), EVERY[name]
        seen[key] = number + 1
        if every == 0 or number % every:
            item.add_marker(pytest.mark.exhaustive)
