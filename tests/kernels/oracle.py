"""What the ops should compute, in float64 NumPy, written without looking at their JAX code."""

import numpy as np

NEGATIVE = -1e30


def rope(x, positions, theta):
    """x [B, H, T, D] at positions [B, 1, T]; angles in float32 as in models, the rest not."""
    d = x.shape[-1]
    frequencies = np.float32(1) / np.float32(theta) ** (np.arange(0, d, 2, dtype=np.float32) / d)
    angle = (positions[..., None].astype(np.float32) * frequencies).astype(np.float64)
    cos, sin = np.cos(angle), np.sin(angle)
    a, b = x[..., : d // 2], x[..., d // 2 :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def scores(q, k, pad, positions=None, theta=None):
    """q [B, R, H, D], k [B, Hk, T, D] -> scaled scores [B, H, R, T], masked ones NEGATIVE."""
    q, k = q.astype(np.float64).transpose(0, 2, 1, 3), k.astype(np.float64)
    b, h, _, d = q.shape
    t = k.shape[2]
    if theta is not None:
        q = rope(q, positions[:, None], theta)
        own = np.arange(t)[None, :] - pad[:, None]
        k = rope(k, own[:, None], theta)
    out = np.empty((b, h, q.shape[2], t))
    for head in range(h):
        out[:, head] = q[:, head] @ k[:, head // (h // k.shape[1])].transpose(0, 2, 1)
    out /= np.sqrt(d)
    mask = np.arange(t)[None, :] >= pad[:, None]
    return np.where(mask[:, None, None], out, NEGATIVE)


def softmax(s):
    top = s.max(-1, keepdims=True)
    weights = np.exp(s - top)
    total = weights.sum(-1, keepdims=True)
    return weights / total, (top + np.log(total))[..., 0]


def attended(p, v):
    """p [B, H, R, T], v [B, Hk, T, D] -> [B, R, H * D]."""
    v = v.astype(np.float64)
    b, h, r, _ = p.shape
    group = h // v.shape[1]
    out = np.stack([p[:, i] @ v[:, i // group] for i in range(h)], axis=2)
    return out.reshape(b, r, h * v.shape[3])


def token_drift(now, before):
    """Mean over heads of max(0, KL), probabilities floored at 1e-12; scores [B, H, R, T]."""
    p, q = softmax(now)[0], softmax(before)[0]
    kl = (p * (np.log(np.maximum(p, 1e-12)) - np.log(np.maximum(q, 1e-12)))).sum(-1)
    return np.maximum(kl, 0).mean(1)


def cluster_drift(now, before):
    """Mean over heads of max(0, sum p (log(p + 1e-12) - log(q + 1e-12)))."""
    p, q = softmax(now)[0], softmax(before)[0]
    kl = (p * (np.log(p + 1e-12) - np.log(q + 1e-12))).sum(-1)
    return np.maximum(kl, 0).mean(1)


def gather(x, rows, count):
    """x [B, Hk, T, D] -> [B, R, Hk, D], zeros beyond count."""
    out = np.zeros((*rows.shape, x.shape[1], x.shape[3]), x.dtype)
    for b, some in enumerate(count):
        for r in range(some):
            out[b, r] = x[b, :, rows[b, r]]
    return out


def scatter(x, new, rows, count):
    out = x.copy()
    for b, some in enumerate(count):
        for r in range(some):
            out[b, :, rows[b, r]] = new[b, r]
    return out
