"""What distinguishes one model from another: sizes and constants, read from `config.json`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from polestar_jax.checks import check_integer
from polestar_jax.errors import PolestarError

FAMILIES = ("llada", "dream")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Static description of one transformer. Symbols: M width, H heads, D head size, F MLP width.

    Both families are the same computation; the fields below are all that differs between them.
    """

    family: str
    vocab_size: int  # legal token ids are [0, vocab_size)
    embedding_rows: int  # rows of the embedding and head, >= vocab_size
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    rope_theta: float
    norm_eps: float
    max_length: int  # prompt and generation together
    qkv_bias: bool
    tied_head: bool
    shift_logits: bool  # Dream: the prediction for position i is read at position i - 1
    mask_token: int
    eos_token: int
    pad_token: int
    bos_token: int | None = None
    eot_token: int | None = None  # end of turn, LLaDA instruct models

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise PolestarError(
                f"unknown model family {self.family!r}; known: {', '.join(FAMILIES)}"
            )
        for name in (
            "vocab_size", "embedding_rows", "width", "num_layers", "num_heads", "num_kv_heads",
            "head_dim", "mlp_width", "max_length",
        ):  # fmt: skip
            check_integer(name, getattr(self, name), 1)
        for name in ("rope_theta", "norm_eps"):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and 0 < value < float("inf")):
                raise PolestarError(f"{name} must be a positive number, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise PolestarError(
                f"num_heads ({self.num_heads}) must be a multiple of "
                f"num_kv_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise PolestarError(f"head_dim must be even for rotary positions, got {self.head_dim}")
        if self.embedding_rows < self.vocab_size:
            raise PolestarError(
                f"embedding_rows ({self.embedding_rows}) is smaller than "
                f"vocab_size ({self.vocab_size})"
            )
        for name in ("mask_token", "eos_token", "pad_token", "bos_token", "eot_token"):
            token = getattr(self, name)
            if token is None and name in ("bos_token", "eot_token"):
                continue
            check_integer(name, token, 0)
            if token >= self.vocab_size:
                raise PolestarError(
                    f"{name} is {token}, outside the vocabulary of {self.vocab_size} tokens"
                )

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ModelConfig":
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise PolestarError(f"unknown model configuration fields: {', '.join(unknown)}")
        try:
            return cls(**values)
        except TypeError as error:
            raise PolestarError(
                f"the model configuration is incomplete ({error}); convert the checkpoint again"
            ) from None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Read a Hugging Face `config.json` of the LLaDA or Dream family."""
        kind = str(config.get("model_type", "")).lower()
        try:
            if kind == "llada":
                return _llada(cls, config)
            if kind == "dream":
                return _dream(cls, config)
        except KeyError as missing:
            raise PolestarError(
                f"config.json of model_type {kind!r} lacks the field {missing}; "
                "is this a complete LLaDA or Dream checkpoint?"
            ) from None
        except PolestarError:
            raise
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise PolestarError(
                f"config.json of model_type {kind!r} holds a value that cannot be used ({error}); "
                "compare it with the released one"
            ) from None
        raise PolestarError(
            f"model_type {config.get('model_type')!r} is not supported; expected 'llada' or 'Dream'"
        )


LLADA_EOT = 126348  # <|eot_id|> of the released LLaDA tokenizer; absent from its config.json


def _require(config: Mapping[str, Any], name: str, expected: Any, default: Any) -> None:
    value = config.get(name, default)
    if value != expected:
        raise PolestarError(f"{name} = {value!r} is not supported, only {expected!r}")


def _llada(cls: type[ModelConfig], c: Mapping[str, Any]) -> ModelConfig:
    for name, expected in (
        ("block_type", "llama"), ("layer_norm_type", "rms"), ("activation_type", "silu"),
        ("rope", True), ("alibi", False), ("include_bias", False), ("bias_for_layer_norm", False),
        ("attention_layer_norm", False), ("input_emb_norm", False), ("scale_logits", False),
    ):  # fmt: skip
        _require(c, name, expected, expected)
    heads = c["n_heads"]
    kv_heads = c.get("n_kv_heads")
    if kv_heads is None:
        kv_heads = 1 if c.get("multi_query_attention") else heads
    mlp = c.get("mlp_hidden_size")
    if mlp is None:
        mlp = c.get("mlp_ratio", 4) * c["d_model"]
    vocab = c["vocab_size"]
    return cls(
        family="llada",
        vocab_size=vocab,
        embedding_rows=c.get("embedding_size") or vocab,
        width=c["d_model"],
        num_layers=c["n_layers"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=c["d_model"] // heads,
        mlp_width=mlp,
        rope_theta=float(c.get("rope_theta", 10000.0)),
        norm_eps=float(c.get("rms_norm_eps", 1e-5)),
        max_length=c["max_sequence_length"],
        qkv_bias=bool(c.get("include_qkv_bias", False)),
        tied_head=bool(c.get("weight_tying", True)),
        shift_logits=False,
        mask_token=c["mask_token_id"],
        eos_token=c["eos_token_id"],
        pad_token=c.get("pad_token_id", c["eos_token_id"]),
        bos_token=c.get("bos_token_id"),
        eot_token=c.get("eot_token_id", LLADA_EOT if vocab > LLADA_EOT else None),
    )


def _dream(cls: type[ModelConfig], c: Mapping[str, Any]) -> ModelConfig:
    _require(c, "hidden_act", "silu", "silu")
    _require(c, "use_sliding_window", False, False)
    if c.get("rope_scaling"):
        raise PolestarError(f"rope_scaling = {c['rope_scaling']!r} is not supported, only null")
    heads = c["num_attention_heads"]
    vocab = c["vocab_size"]
    return cls(
        family="dream",
        vocab_size=vocab,
        embedding_rows=vocab,
        width=c["hidden_size"],
        num_layers=c["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=c.get("num_key_value_heads", heads),
        head_dim=c.get("head_dim") or c["hidden_size"] // heads,
        mlp_width=c["intermediate_size"],
        rope_theta=float(c.get("rope_theta", 10000.0)),
        norm_eps=float(c.get("rms_norm_eps", 1e-6)),
        max_length=c["max_position_embeddings"],
        qkv_bias=True,
        tied_head=bool(c.get("tie_word_embeddings", False)),
        shift_logits=True,
        mask_token=c["mask_token_id"],
        eos_token=c["eos_token_id"],
        pad_token=c.get("pad_token_id", c["eos_token_id"]),
        bos_token=c.get("bos_token_id"),
    )
