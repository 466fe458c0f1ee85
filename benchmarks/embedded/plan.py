"""What is trained, on which tasks, for how long: every number of a training run in one place."""

import dataclasses
from collections.abc import Mapping

from benchmarks.embedded.vocabulary import BOS, EOS, MASK, vocabulary
from benchmarks.tasks import TASKS
from polestar_jax.errors import PolestarError
from polestar_jax.models.config import ModelConfig

MAX_LENGTH = 512  # prompt and generation together


@dataclasses.dataclass(frozen=True)
class Plan:
    """A training run of any number of steps.

    What happens before the learning rate falls is counted in steps, so that two runs of different
    length agree up to there; `decay` and `long_from` are fractions of the run.

    tasks: task -> weight among the training rows.
    mask_first, mask_full: until step `mask_first` the masked share is drawn from [0.5, 1]; the
        range then widens, to all of [0.02, 1] at step `mask_full`.
    warm_up: steps. decay: the last part of the run, in which the rates fall along a cosine.
    short_canvas, middle_canvas, long_canvas: tokens of a row. Most fit the short one, the others
        take the middle one. From `long_from` on, half of the calls use the long one for all, with
        response windows of 32 to 64 tokens.
    batch: rows a step on the short canvas; fewer on the others, for as many tokens.
    block_masks: share of rows masked as in decoding block by block.
    """

    name: str
    tasks: Mapping[str, float]
    width: int = 128
    layers: int = 4
    heads: int = 4
    mlp_width: int = 384
    batch: int = 48
    short_canvas: int = 44
    middle_canvas: int = 50
    long_canvas: int = 92
    learning_rate: float = 8e-3
    adam_rate: float = 2e-3
    last_rate: float = 2e-5
    warm_up: int = 12
    decay: float = 0.45
    weight_decay: float = 0.05
    clip: float = 1.0
    mask_first: int = 150
    mask_full: int = 300
    long_from: float = 0.7
    block_masks: float = 0.2
    steps_per_call: int = 10

    def __post_init__(self) -> None:
        for name in self.tasks:
            if name not in TASKS:
                raise PolestarError(f"unknown task {name!r} in the plan; known: {', '.join(TASKS)}")

    def model_config(self) -> ModelConfig:
        return ModelConfig.from_hf(self.hf_config())

    def hf_config(self) -> dict[str, object]:
        """`config.json` of the exported checkpoint."""
        ids = vocabulary()
        return {
            "activation_type": "silu",
            "alibi": False,
            "architectures": ["LLaDAModelLM"],
            "attention_layer_norm": False,
            "bias_for_layer_norm": False,
            "block_type": "llama",
            "bos_token_id": ids[BOS],
            "d_model": self.width,
            "embedding_size": len(ids),
            "eos_token_id": ids[EOS],
            "include_bias": False,
            "include_qkv_bias": False,
            "input_emb_norm": False,
            "layer_norm_type": "rms",
            "layer_norm_with_affine": True,
            "mask_token_id": ids[MASK],
            "max_sequence_length": MAX_LENGTH,
            "mlp_hidden_size": self.mlp_width,
            "model_type": "llada",
            "n_heads": self.heads,
            "n_kv_heads": self.heads,
            "n_layers": self.layers,
            "pad_token_id": ids[EOS],
            "rms_norm_eps": 1e-5,
            "rope": True,
            "rope_theta": 10000.0,
            "scale_logits": False,
            "torch_dtype": "float16",
            "vocab_size": len(ids),
            "weight_tying": False,
        }


_QUICK = dict.fromkeys(("copy", "reverse", "insert_index", "remove_index"), 1.0) | {
    "replace_index": 1.0,
    "sudoku": 1.5,
}
_FULL = dict.fromkeys(TASKS, 0.8) | {
    "copy": 0.3,
    "reverse": 0.3,
    "sort": 1.5,
    "insert_random": 1.2,
    "remove_random": 1.0,
    "replace_random": 1.2,
    "latin": 1.0,
    "add": 1.5,
}

_POLISH = dict.fromkeys(TASKS, 0.5) | {
    "copy": 0.2,
    "reverse": 0.2,
    "sort": 2.5,
    "insert_random": 1.0,
    "remove_random": 1.0,
    "replace_random": 1.2,
    "latin": 2.5,
    "sudoku": 1.0,
    "add": 2.5,
}

PLANS = {
    "quick": Plan("quick", _QUICK),
    # Higher rates (a trial at 5e-3) leave the loss flat until they fall.
    "full": Plan(
        "full",
        _FULL,
        learning_rate=3e-3,
        adam_rate=1e-3,
        warm_up=50,
        decay=0.5,
        mask_first=600,
        mask_full=2500,
        long_from=0.75,
    ),
    # From the model of the full plan: weight on what was short of its goal.
    "polish": Plan(
        "polish",
        _POLISH,
        learning_rate=2e-3,
        adam_rate=7e-4,
        warm_up=50,
        decay=0.6,
        mask_first=0,
        mask_full=1,
        long_from=0.75,
    ),
}
