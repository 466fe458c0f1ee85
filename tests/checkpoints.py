"""Checkpoints made up on the spot: small ones from arrays, big ones streamed to disk."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from polestar_jax.convert.names import tensor_name
from polestar_jax.models.config import ModelConfig
from polestar_jax.models.transformer import parameter_shapes

SMALL = {
    "llada": {
        "model_type": "llada", "vocab_size": 40, "embedding_size": 48, "d_model": 16, "n_layers": 2,
        "n_heads": 4, "n_kv_heads": 2, "mlp_hidden_size": 24, "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5, "max_sequence_length": 64, "weight_tying": False,
        "mask_token_id": 39, "eos_token_id": 38, "pad_token_id": 38,
    },
    "dream": {
        "model_type": "Dream", "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24,
        "rope_theta": 1e6, "rms_norm_eps": 1e-6, "max_position_embeddings": 64,
        "mask_token_id": 39, "eos_token_id": 38, "pad_token_id": 38,
    },
}  # fmt: skip


def config(raw: Mapping) -> ModelConfig:
    return ModelConfig.from_hf(raw)


def stored_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes as PyTorch stores them: matrices the other way round."""
    return {
        tensor_name(config.family, p): s if p == "embed" else s[::-1]
        for p, s in parameter_shapes(config).items()
    }


def random_tensors(raw: Mapping, dtype: np.dtype | type = np.float32) -> dict[str, np.ndarray]:
    """Every tensor a checkpoint of this config.json must have, with random values."""
    rng = np.random.default_rng(0)
    shapes = stored_shapes(ModelConfig.from_hf(raw))
    return {n: rng.normal(size=s).astype(np.float32).astype(dtype) for n, s in shapes.items()}


def write(directory: Path, raw: Mapping, shards: list[dict[str, np.ndarray]]) -> Path:
    """A Hugging Face directory; several shards come with an index."""
    from safetensors.numpy import save_file

    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw))
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = ["model.safetensors"]
    else:
        weight_map = {t: n for n, shard in zip(names, shards) for t in shard}
        index = {"metadata": {}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    for name, shard in zip(names, shards):
        save_file(shard, directory / name)
    return directory


def split(tensors: dict[str, np.ndarray], count: int) -> list[dict[str, np.ndarray]]:
    """The same tensors dealt out to several shards."""
    names = list(tensors)
    return [{n: tensors[n] for n in names[i::count]} for i in range(count)]


def write_large(directory: Path, raw: Mapping, shard_bytes: int) -> int:
    """Stream a bfloat16 checkpoint to disk, a block at a time; returns its size in bytes."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(raw))
    bits = np.random.default_rng(0).integers(0x3C00, 0x3F80, 1 << 23, dtype=np.uint16)
    block = memoryview(bits).cast("B")
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    for name, shape in stored_shapes(ModelConfig.from_hf(raw)).items():
        if filled > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = shape
        filled += 2 * int(np.prod(shape))
    weight_map, total = {}, 0
    for number, shard in enumerate(shards):
        file = directory / f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        header, end = {}, 0
        for name, shape in shard.items():
            start, end = end, end + 2 * int(np.prod(shape))
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
            weight_map[name] = file.name
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with file.open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for left in range(end, 0, -len(block)):
                out.write(block[: min(left, len(block))])
        total += end
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def add_tokenizer(directory: Path, template: str | None = None) -> Path:
    """Give a directory a byte-level tokenizer of a few letters; tokens 38 and 39 are EOS, mask."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = "abcdefghijklmnopqrstuvwxyz .,?!0123Ġ<>|"[:38]
    rules = Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    rules.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rules.decoder = decoders.ByteLevel()
    rules.add_special_tokens([AddedToken("<eos>"), AddedToken("<mask>")])
    rules.save(str(directory / "tokenizer.json"))
    settings = {"eos_token": "<eos>", "mask_token": "<mask>"}
    if template is not None:
        settings["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory
