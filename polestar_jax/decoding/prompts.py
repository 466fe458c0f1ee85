"""Prompts of any accepted form as one left-padded array, or one clear error."""

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from polestar_jax.decoding.config import DecodeConfig
from polestar_jax.errors import PolestarError

if TYPE_CHECKING:
    from polestar_jax.weights import Model

SMALL_BUCKETS = (64, 128, 256, 512)


@dataclasses.dataclass(frozen=True)
class Prompts:
    """int32 tokens [B, P + G], canvas masked, and the number of left pads int32 [B]."""

    tokens: np.ndarray
    pad: np.ndarray


def bucket_length(longest: int, config: DecodeConfig, least: int = 0) -> int:
    """Padded prompt length P for the longest prompt of a batch."""
    longest = max(longest, least)
    if config.prompt_bucket is not None:
        return -(-longest // config.prompt_bucket) * config.prompt_bucket
    for size in SMALL_BUCKETS:
        if longest <= size:
            return size
    return -(-longest // SMALL_BUCKETS[-1]) * SMALL_BUCKETS[-1]


def prepare_prompts(model: "Model", prompts: Any, config: DecodeConfig) -> Prompts:
    """Tokenize, check and left-pad; see `decode` for the accepted forms."""
    if config.prompt_bucket is not None and config.prompt_bucket > model.config.max_length:
        raise PolestarError(
            f"prompt_bucket {config.prompt_bucket} exceeds the model's maximum of "
            f"{model.config.max_length} tokens; choose a smaller one"
        )
    rows = _token_rows(model, prompts)
    if not rows:
        raise PolestarError("the batch has no prompts; pass at least one")
    c = model.config
    for index, row in enumerate(rows):
        where = f"prompt {index}"
        if row.size == 0 and not config.allow_empty_prompt:
            raise PolestarError(
                f"{where} is empty; write a prompt, or set allow_empty_prompt=True for "
                "unconditional generation"
            )
        if row.size + config.gen_length > c.max_length:
            raise PolestarError(
                f"{where} has {row.size} tokens, which with gen_length {config.gen_length} exceeds "
                f"the model's maximum of {c.max_length}; shorten the prompt or gen_length"
            )
        bad = row[(row < 0) | (row >= c.vocab_size)]
        if bad.size:
            raise PolestarError(
                f"{where} holds token id {bad[0]}, outside the vocabulary of {c.vocab_size}"
            )
        if (row == c.mask_token).any():
            raise PolestarError(
                f"{where} contains the mask token ({c.mask_token}) at position "
                f"{int(np.argmax(row == c.mask_token))}; remove it"
            )
    # A shifted model reads the first prediction one row before the canvas: keep one row there.
    width = bucket_length(max(r.size for r in rows), config, least=int(c.shift_logits))
    tokens = np.full((len(rows), width + config.gen_length), c.mask_token, np.int32)
    tokens[:, :width] = c.pad_token
    for row, out in zip(rows, tokens):
        out[width - row.size : width] = row
    return Prompts(tokens, np.asarray([width - r.size for r in rows], np.int32))


def _token_rows(model: "Model", prompts: Any) -> list[np.ndarray]:
    if isinstance(prompts, str):
        prompts = [prompts]
    if hasattr(prompts, "ndim"):
        prompts = np.asarray(prompts)
        if prompts.ndim != 2:
            raise PolestarError(
                f"a prompt array must have shape [batch, length], got {prompts.shape}"
            )
    if not isinstance(prompts, (list, tuple, np.ndarray)):
        raise PolestarError(
            "prompts must be a string, a list of strings, a list of token-id lists or an integer "
            f"array [batch, length], got {type(prompts).__name__}"
        )
    return [_token_row(model, index, prompt) for index, prompt in enumerate(prompts)]


def _token_row(model: "Model", index: int, prompt: Any) -> np.ndarray:
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise PolestarError(
                f"prompt {index} is text but the model has no tokenizer; pass token ids"
            )
        # A blank string is empty whatever a chat template would wrap around it.
        return np.asarray(model.tokenizer.encode_prompt(prompt) if prompt.strip() else [], np.int32)
    if isinstance(prompt, (bytes, dict)) or not hasattr(prompt, "__len__"):
        raise PolestarError(
            f"prompt {index} must be a string or a list of token ids, got {type(prompt).__name__}"
        )
    try:
        row = np.asarray(prompt)
    except ValueError:  # lists of unequal depth
        row = np.asarray(prompt, object)
    if row.size == 0:
        return np.zeros(0, np.int32)
    if row.ndim != 1 or not np.issubdtype(row.dtype, np.integer):
        raise PolestarError(
            f"prompt {index} must be a flat list of whole-number token ids, got {prompt!r:.80}"
        )
    return row.astype(np.int64)
