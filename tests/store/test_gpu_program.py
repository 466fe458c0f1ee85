"""Host stores in the decode program compiled for H200: copies overlap, nothing runs on the host."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

import polestar_jax as pj
from polestar_jax.decoding import loop
from polestar_jax.decoding.decode import context_of
from polestar_jax.kernels import aot
from polestar_jax.models.transformer import abstract_transformer
from polestar_jax.store.rows import row_bytes
from tests.store.schedule import HOST, host_work, loops, opcode, transfers

LAYERS, WIDTH, TOTAL, WINDOW = 4, 512, 512, 128
MODEL = pj.ModelConfig(
    family="llada", vocab_size=1000, embedding_rows=1024, width=WIDTH, num_layers=LAYERS,
    num_heads=4, num_kv_heads=4, head_dim=128, mlp_width=1024, rope_theta=5e5, norm_eps=1e-5,
    max_length=4096, qkv_bias=False, tied_head=False, shift_logits=False, mask_token=998,
    eos_token=999, pad_token=999,
)  # fmt: skip

EARLY = """
%body (p: (f32[8], bf16[4,8])) -> (f32[8], bf16[4,8]) {
  %x = f32[8]{0} get-tuple-element(%p), index=0
  %h = bf16[4,8]{1,0:S(5)} get-tuple-element(%p), index=1
  %copy-start = (bf16[4,8]{1,0}, bf16[4,8]{1,0:S(5)}, u32[]) copy-start(%h)
  %gemm_fusion_dot = f32[8]{0} fusion(%x), kind=kCustom, calls=%f
  %copy-done = bf16[4,8]{1,0} copy-done(%copy-start)
  ROOT %t = (f32[8], bf16[4,8]{1,0:S(5)}) tuple(%gemm_fusion_dot, %h)
}

ENTRY %main (a: f32[8]) -> f32[8] {
  ROOT %while = (f32[8]{0}, bf16[4,8]{1,0:S(5)}) while(%t), condition=%c, body=%body
}
"""


def test_the_reader_tells_copies_behind_products_from_copies_waited_for():
    (body,) = loops(EARLY).values()
    (early,) = transfers(body)
    assert (early.direction, early.shape, early.products) == ("in", "bf16[4,8]", 1)
    done = next(line for line in body if "copy-done(" in line)
    start = next(i for i, line in enumerate(body) if "copy-start(" in line)
    late = [line for line in body if line is not done]
    late.insert(start + 1, done)
    assert transfers(late)[0].products == 0
    assert host_work(body) == []
    assert host_work([*body, "  %c = bf16[4,8]{1,0:S(5)} copy(%h)"])
    assert host_work([*body, "  %g = bf16[2,8]{1,0:S(5)} gather(%h, %i)"])


@functools.cache
def program(batch: int = 1, card: str = "H200", **stores) -> aot.Program:
    """The whole generation; its state, made inside, lies where it should."""
    cache = pj.PolestarCache(capacities=(1000,), **stores)
    config = pj.DecodeConfig(
        gen_length=256, block_length=32, cache=cache, commit=pj.PolestarCommit()
    )

    def run(params, tokens, pad, keys):
        ctx = context_of(MODEL, params, config, tokens, pad)
        return loop.generate(ctx, loop.empty_state(ctx, tokens, keys))

    shape = jax.ShapeDtypeStruct
    args = (
        abstract_transformer(MODEL, jnp.bfloat16)[1],
        shape((batch, TOTAL), jnp.int32),
        shape((batch,), jnp.int32),
        jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch)),
    )
    return aot.compile_for(run, args, card)


def passes(p: aot.Program) -> list[list]:
    """The transfers of every pass that has any."""
    every = (transfers(lines) for lines in loops(p.hlo).values())
    return [found for found in every if found]


def moves(found: list, direction: str) -> list:
    return [t for t in found if t.direction == direction]


@pytest.mark.gpu_compiler
@pytest.mark.slow
def test_hidden_rows_cross_behind_the_layer_before_and_only_where_needed():
    p = program(hidden_store="host", hidden_dtype="nvfp4")
    refresh = next(found for found in passes(p) if moves(found, "in"))
    openings = [found for found in passes(p) if not moves(found, "in")]
    # One copy in per layer; layer 0's starts with the pass, the others a layer ahead.
    fetched = moves(refresh, "in")
    assert [t.shape for t in fetched] == [f"u8[1,{WINDOW},{row_bytes(WIDTH)}]"] * LAYERS
    assert min(t.products for t in fetched[1:]) >= 4  # a layer has 7 matrix products in 6 calls
    # Written back where a packet arrived: all layers but the first. Openings only write.
    assert len(moves(refresh, "out")) == LAYERS - 1
    assert [len(moves(found, "out")) for found in openings] == [LAYERS, LAYERS]
    assert not [line for body in loops(p.hlo).values() for line in host_work(body)]


@pytest.mark.gpu_compiler
@pytest.mark.slow
def test_the_device_holds_two_layers_of_hidden_rows_at_most():
    """Against the same program with all rows on the device, by the compiler's own account."""
    here = program(hidden_dtype="nvfp4")
    away = program(hidden_store="host", hidden_dtype="nvfp4")
    layer = WINDOW * row_bytes(WIDTH)
    saved = here.temp + here.output - away.temp - away.output
    assert saved >= (LAYERS - 2) * layer - 4096  # alignment


@pytest.mark.gpu_compiler
@pytest.mark.slow
def test_keys_and_values_cross_behind_the_layer_before_and_are_updated_in_place():
    p = program(batch=2, kv_store="host")
    every = passes(p)
    assert len(every) == 4  # full and windowed openings, cached passes, refreshes
    whole = f"bf16[2,2,4,{TOTAL},128]"
    for found in every:
        fetched = moves(found, "in")
        assert [t.shape for t in fetched] == [whole] * LAYERS
        assert moves(found, "host") == []
    cached = min(every, key=lambda found: sum(t.products for t in found))
    assert all(t.products >= 1 for t in moves(cached, "in")[1:])
    for found in every:
        for written in moves(found, "out"):
            rows = int(written.shape.split(",")[3])
            assert rows in (32, WINDOW, TOTAL // 2)
    assert not [line for body in loops(p.hlo).values() for line in host_work(body)]


@pytest.mark.gpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize("card", ["H200", "A100"])
def test_four_bits_are_bytes_and_integers_that_every_card_computes_with(card):
    """Ampere has neither E2M1 nor E4M3. What was fetched is read by the device's own kernels."""
    stores = {"hidden_store": "host", "hidden_dtype": "nvfp4"}
    p = program(card=card, **stores) if card != "H200" else program(**stores)
    assert not re.search(r"\bf[48]e\d", p.hlo)
    refresh = next(body for body in loops(p.hlo).values() if moves(transfers(body), "in"))
    done = [line for line in refresh if "u8[" in line and opcode(line) == "copy-done"]
    arrived = [line for line in done if HOST not in line]
    assert len(arrived) == LAYERS
    for line in arrived:
        name = line.split("=")[0].strip()
        readers = [x for x in refresh if re.search(rf"[( ]{re.escape(name)}[,)]", x)]
        assert {opcode(x) for x in readers} == {"fusion"}
    kernels = [x for x in refresh if "/dequantise/" in x and opcode(x) == "custom-call"]
    assert len(kernels) >= LAYERS
