"""Named model shapes that benchmarks and ahead-of-time checks share; the weights are random."""

from polestar_jax.config import ModelConfig


def small(layers: int, width: int, heads: int, mlp: int, vocab: int) -> ModelConfig:
    """A LLaDA-like model; its last token is the mask, the one before it EOS."""
    return ModelConfig(
        family="llada", vocab_size=vocab, embedding_rows=vocab, width=width, num_layers=layers,
        num_heads=heads, num_kv_heads=heads, head_dim=width // heads, mlp_width=mlp,
        rope_theta=500_000.0, norm_eps=1e-5, max_length=4096, qkv_bias=False, tied_head=False,
        shift_logits=False, mask_token=vocab - 1, eos_token=vocab - 2, pad_token=vocab - 2,
    )  # fmt: skip


LLADA_8B = ModelConfig(
    family="llada", vocab_size=126464, embedding_rows=126464, width=4096, num_layers=32,
    num_heads=32, num_kv_heads=32, head_dim=128, mlp_width=12288, rope_theta=500_000.0,
    norm_eps=1e-5, max_length=4096, qkv_bias=False, tied_head=False, shift_logits=False,
    mask_token=126336, eos_token=126081, pad_token=126081, eot_token=126348,
)  # fmt: skip
DREAM_7B = ModelConfig(
    family="dream", vocab_size=152064, embedding_rows=152064, width=3584, num_layers=28,
    num_heads=28, num_kv_heads=4, head_dim=128, mlp_width=18944, rope_theta=1_000_000.0,
    norm_eps=1e-6, max_length=131072, qkv_bias=True, tied_head=False, shift_logits=True,
    mask_token=151666, eos_token=151643, pad_token=151643,
)  # fmt: skip

LARGE = {"llada-8b": LLADA_8B, "dream-7b": DREAM_7B}
SMALL = {
    "tiny": small(2, 64, 4, 192, 128),
    "4x128": small(4, 128, 4, 384, 360),  # the embedded model's size
    "8x512": small(8, 512, 8, 1536, 8192),  # LLaDA-8B's proportions
}
