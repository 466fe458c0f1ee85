"""Block-wise decoding without Polestar: cache policies none, prefix, dual and the commit rules."""

import dataclasses

import numpy as np

from oracle.transformer import Array, Net


@dataclasses.dataclass
class Pass:
    """What one model pass saw and did; arrays over all T positions."""

    tokens: Array  # after the commits
    confidence: Array  # NaN where the pass made no prediction
    argmax: Array  # -1 there
    rows: tuple[int, int]


def fixed(steps: int, confidence: str = "probability", schedule: str = "uniform"):
    """m masks in `steps` steps a block; most confident first, ties to the lowest position."""

    def rule(p: Array, masked: Array, step: int, memory: dict) -> Array:
        if step == 0:
            memory["masks"] = int(masked.sum())
        if schedule == "uniform":
            count = memory["masks"] // steps + (step < memory["masks"] % steps)
        else:
            t = np.linspace(1, 1e-3, steps + 1)
            m = int(masked.sum())
            count = m if step == steps - 1 else int(m * (1 - t[step + 1] / t[step]))
        top = -np.sort(-p, axis=-1)[:, :2]
        score = {
            "probability": top[:, 0],
            "margin": top[:, 0] - top[:, 1],
            "entropy": (p * np.log(p + 1e-10)).sum(-1),
        }[confidence]
        return best(score, masked, count)

    return rule


def best(score: Array, masked: Array, count: int) -> Array:
    chosen = np.zeros(len(score), bool)
    order = sorted(np.flatnonzero(masked), key=lambda i: (-score[i], i))
    chosen[order[:count]] = True
    return chosen


def threshold(tau: float):
    """Every masked row at least as confident as tau, and always the best one."""

    def rule(p: Array, masked: Array, step: int, memory: dict) -> Array:
        c = p.max(-1)
        return best(c, masked, 1) | (masked & (c >= tau))

    return rule


def budget_threshold(tau: float, per_step: float):
    """Dream's own: of the q = G/S + carry most confident masks, those with c >= tau."""

    def rule(p: Array, masked: Array, step: int, memory: dict) -> Array:
        quota = per_step + memory.get("carry", 0)
        c = p.max(-1)
        chosen = best(c, masked, 1) | (best(c, masked, int(quota)) & (c >= tau))
        memory["carry"] = quota - int(chosen.sum())
        return chosen

    return rule


def factor(f: float, edge: bool):
    """Accept ranks while c of rank n is at least 1 - f / (n + 1); rank 1 is never tested."""

    def rule(p: Array, masked: Array, step: int, memory: dict) -> Array:
        c = p.max(-1)
        m = int(masked.sum())
        ranked = -np.sort(-c[masked])
        count = m
        for n in range(2, m + 1):
            if ranked[n - 1] < 1 - f / (n + 1):
                count = m if edge and n == m else n - 1
                break
        return best(c, masked, count)

    return rule


def finish_at_eos(x: Array, prompt: int, net: Net) -> bool:
    """Once an EOS and everything before it is committed, the rest is EOS."""
    for i in range(prompt, len(x)):
        if x[i] == net.config.mask_token:
            return False
        if x[i] == net.config.eos_token:
            x[i:] = net.config.eos_token
            return True
    return False


def reader(net: Net, position: int, first: int) -> int:
    """The row whose output predicts `position`, in a pass that starts at row `first`."""
    return max(position - 1, first) if net.config.shift_logits else position


def lead_in(net: Net, start: int, shift: str) -> int:
    """First row of a block's pass: Dream's exact shift needs the row before the block."""
    return max(start - 1, 0) if net.config.shift_logits and shift == "exact" else start


def observe(net: Net, x: Array, hidden: Array, first: int, end: int) -> tuple[Array, Array]:
    """Probabilities [T, V] of the positions predicted by rows [first, end), NaN elsewhere."""
    p = net.predict(hidden)
    full = np.full((len(x), p.shape[-1]), np.nan)
    for i in range(first, end):
        full[i] = p[reader(net, i, first) - first]
    return full, np.where(np.isnan(full[:, 0]), np.nan, full.max(-1))


def decode(
    net: Net,
    prompt: Array,
    gen_length: int,
    block_length: int,
    rule,
    cache: str = "none",
    shift: str = "exact",
    stop_at_eos: bool = False,
    teacher: list[Array] | None = None,
) -> list[Pass]:
    """All passes. `teacher`: recorded sequences that replace the result of each pass."""
    start, mask = len(prompt), net.config.mask_token
    x = np.concatenate([prompt, np.full(gen_length, mask)]).astype(int)
    total, passes = len(x), []
    store, done = net.empty_cache(total), False
    for s in range(start, total, block_length):
        e, memory, step = s + block_length, {}, 0
        while not done and (x[s:e] == mask).any():
            first, end = 0, total
            if step > 0 and cache != "none":
                first = lead_in(net, s, shift)
                end = total if cache == "prefix" else e
            hidden, _, _ = net.forward(x, np.arange(first, end), store)
            p, c = observe(net, x, hidden, first, end)
            chosen = rule(p[s:e], x[s:e] == mask, step, memory)
            if teacher is not None:
                x = teacher[len(passes)].astype(int)
            else:
                x[s:e][chosen] = p[s:e].argmax(-1)[chosen]
                done = stop_at_eos and finish_at_eos(x, start, net)
            guess = np.where(np.isnan(c), -1, np.nan_to_num(p).argmax(-1))
            passes.append(Pass(x.copy(), c, guess, (first, end)))
            step += 1
    return passes
