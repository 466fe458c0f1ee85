"""Bootstrap intervals over prompts."""

from collections.abc import Callable

import numpy as np
from scipy import stats

LEVEL = 0.95
RESAMPLES = 2000
SEED = 20260714


def interval(statistic: Callable[..., np.ndarray], *samples: np.ndarray) -> tuple[float, float]:
    """95 % percentile interval of `statistic(*samples, axis=...)`, prompts drawn with repetition.

    Samples [prompts] are resampled together. The same samples give the same interval.
    """
    if len(samples[0]) == 1 or all(np.ptp(sample) == 0 for sample in samples):
        value = float(statistic(*samples, axis=-1))  # nothing to resample
        return value, value
    result = stats.bootstrap(
        samples, statistic, paired=len(samples) > 1, vectorized=True, n_resamples=RESAMPLES,
        batch=200, confidence_level=LEVEL, method="percentile",
        random_state=np.random.default_rng(SEED),
    )  # fmt: skip
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def mean(values: np.ndarray, axis: int = -1) -> np.ndarray:
    return np.mean(values, axis=axis)


def ratio(above: np.ndarray, below: np.ndarray, axis: int = -1) -> np.ndarray:
    """Ratio of sums, e.g. tokens per forward over all prompts."""
    return np.sum(above, axis=axis) / np.sum(below, axis=axis)


def difference(one: np.ndarray, other: np.ndarray, axis: int = -1) -> np.ndarray:
    """Mean of the paired differences."""
    return np.mean(one, axis=axis) - np.mean(other, axis=axis)
