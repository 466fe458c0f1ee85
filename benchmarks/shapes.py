"""Named model shapes that benchmarks share; the weights are random."""

from polestar_jax.models.config import ModelConfig


def small(layers: int, width: int, heads: int, mlp: int, vocab: int) -> ModelConfig:
    """A LLaDA-like model; its last token is the mask, the one before it EOS."""
    return ModelConfig(
        family="llada", vocab_size=vocab, embedding_rows=vocab, width=width, num_layers=layers,
        num_heads=heads, num_kv_heads=heads, head_dim=width // heads, mlp_width=mlp,
        rope_theta=500_000.0, norm_eps=1e-5, max_length=4096, qkv_bias=False, tied_head=False,
        shift_logits=False, mask_token=vocab - 1, eos_token=vocab - 2, pad_token=vocab - 2,
    )  # fmt: skip


SMALL = {
    "tiny": small(2, 64, 4, 192, 128),
    "4x128": small(4, 128, 4, 384, 360),  # the embedded model's size
    "8x512": small(8, 512, 8, 1536, 8192),  # LLaDA-8B's proportions
}
