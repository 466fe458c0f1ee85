"""Polestar for one sequence: clustering, proxy attention, sparse refresh and drift commits.

Passes follow the paper (arXiv 2607.14107) with ties decided by rule: an assignment takes the
lowest cluster within 1e-5 of the best cosine, a ranking the lowest index within 1e-6 + 1e-5 m of
the largest score m. A cluster is a dictionary {"rows": labels ...} kept per layer in `Layer`.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from oracle.baselines import best, finish_at_eos, lead_in, reader
from oracle.transformer import Array, Net


@dataclasses.dataclass(frozen=True)
class Settings:
    """Constants of the method; the defaults are the paper's."""

    block_length: int = 32
    window_before: int = 2
    window_after: int = 1
    clusters: int = 8
    refresh: int = 4
    refresh_last: int = 1
    kmeans_iters: int = 5
    trigger_last: int = 1
    trigger_total: int = 2
    windowed: tuple[bool, ...] = (False, False, False, True)
    reembed: bool = False
    tau: float = 0.9
    early: float | None = 0.7
    scale: float = 10.0
    centre: float | None = None  # None: tau
    delta_max: float = 2.0
    history: int = 5
    suffix: bool = True
    shift: str = "exact"
    stop_at_eos: bool = False


@dataclasses.dataclass
class Layer:
    """Stored layer inputs [T, M], label of every position (-1: none) and clusters of one layer."""

    hidden: Array
    labels: Array
    centroids: Array  # [clusters that exist, M]
    counts: Array
    before: int  # clusters of the prefix part
    proxy: Array  # [H, clusters, T] at the last opening or refresh pass


@dataclasses.dataclass
class Pass:
    """Record of one pass; names as in the golden data's description."""

    kind: int  # 0 full opening, 1 windowed opening, 2 plain, 3 with refresh
    rows: tuple[int, int]
    block: tuple[int, int]
    mask_before: Array
    confidence: Array  # [L], NaN where not masked
    argmax: Array
    commit_conf: Array
    commit_drift: Array
    commit_suffix: Array  # [T]
    drift: Array
    delta: Array
    selected: Array  # [N, T]
    scores: list[Array]
    top: list[list[int]]
    tokens: Array
    centroids: list[Array]
    labels: list[Array]
    counts: list[Array]


def rank_clusters(scores: Array, k: int) -> list[int]:
    """The k highest scores; near ties go to the lowest index."""
    left, order = list(range(len(scores))), []
    while left and len(order) < k:
        m = max(scores[i] for i in left)
        order.append(next(i for i in left if scores[i] >= m - (1e-6 + 1e-5 * m)))
        left.remove(order[-1])
    return order


def kmeans(x: Array, clusters: int, iterations: int) -> tuple[Array, Array, Array]:
    """Spherical k-means of rows [n, M]: labels [n], centroids (plain means), member counts."""
    n = len(x)
    if n <= clusters:
        member = np.arange(clusters) % n
        return np.arange(n), x[member].copy(), (np.arange(clusters) < n).astype(float)
    unit = x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12)
    centroids = x[[i * n // clusters for i in range(clusters)]]
    labels, counts = np.zeros(n, int), np.zeros(clusters)
    for _ in range(iterations):
        floor = np.maximum(np.linalg.norm(centroids, axis=-1, keepdims=True), 1e-12)
        cosine = unit @ (centroids / floor).T
        for i in range(n):
            labels[i] = np.flatnonzero(cosine[i] >= cosine[i].max() - 1e-5)[0]
        counts = np.bincount(labels, minlength=clusters).astype(float)
        centroids = np.stack(
            [x[labels == c].mean(0) if counts[c] else x[0] for c in range(clusters)]
        )
    return labels, centroids, counts


def cluster_drift(now: Array, before: Array) -> Array:
    """Mean over heads of max(0, KL) for proxy distributions [H, clusters, T]."""
    kl = (now * (np.log(now + 1e-12) - np.log(before + 1e-12))).sum(-1)
    return np.maximum(kl, 0).mean(0)


def token_drift(now: Array, before: Array) -> Array:
    """Mean over heads of max(0, KL), floored probabilities, for attention rows [H, L, T]."""
    p, q = np.maximum(now, 1e-12), np.maximum(before, 1e-12)
    return np.maximum((now * (np.log(p) - np.log(q))).sum(-1), 0).mean(0)


class Polestar:
    """State of one generation; `run` yields a `Pass` after every model pass."""

    def __init__(self, net: Net, prompt: Array, gen_length: int, settings: Settings) -> None:
        self.net, self.set, self.start = net, settings, len(prompt)
        self.x = np.concatenate([prompt, np.full(gen_length, net.config.mask_token)]).astype(int)
        self.total = len(self.x)
        self.cache = net.empty_cache(self.total)
        self.layers: list[Layer] = []
        self.pending: set[int] = set()  # suffix commits not yet re-embedded
        # Teacher forcing: a pass's selection per layer, the clusters after an opening.
        self.force_selection: Callable[[int, int], Array] | None = None
        self.force_clusters: Callable[[int, int], tuple[Array, Array]] | None = None
        self.force_tokens: Callable[[int], Array] | None = None
        self.passes: list[Pass] = []

    # --- window and clusters -------------------------------------------------------------

    def locate(self, block: int) -> None:
        s, n = self.set, self.set.block_length
        self.s = self.start + block * n
        self.e = self.s + n
        self.w0 = max(0, self.s - s.window_before * n)
        self.w1 = min(self.total, self.e + s.window_after * n)

    def cluster(self, layer: int, hidden: Array) -> Layer:
        s = self.set
        parts = [np.arange(self.w0, self.s), np.arange(self.e, self.w1)]
        rows = len(parts[0]) + len(parts[1])
        before = 0
        if len(parts[0]):
            before = min(max(s.clusters * len(parts[0]) // rows, 1), s.clusters - 1)
        sizes = [before, s.clusters - before if len(parts[1]) else 0]
        labels = np.full(self.total, -1)
        centroids, counts = [np.empty((0, hidden.shape[1]), hidden.dtype)], [np.empty(0)]
        for part, size, offset in zip(parts, sizes, (0, before)):
            if size:
                lab, cen, cnt = kmeans(hidden[part], size, s.kmeans_iters)
                labels[part] = lab + offset
                centroids.append(cen)
                counts.append(cnt)
        made = Layer(
            hidden, labels, np.concatenate(centroids), np.concatenate(counts), before, np.empty(0)
        )
        if self.force_clusters is not None:
            made.labels, made.centroids = self.force_clusters(len(self.passes), layer)
            made.counts = np.array([(made.labels == c).sum() for c in range(len(made.centroids))])
        made.proxy = self.proxy(layer, made)
        return made

    def proxy(self, layer: int, state: Layer) -> Array:
        """Centroids as queries without rotation over un-rotated keys: [H, clusters, T]."""
        queries = self.net.queries(layer, state.centroids)
        return self.net.weights_over(queries, self.cache.k[layer])

    # --- passes --------------------------------------------------------------------------

    def readers(self, first: int) -> Array:
        """Row that predicts each block position, counted from the pass's first row."""
        return np.array([reader(self.net, i, first) - first for i in range(self.s, self.e)])

    def open(self, block: int) -> None:
        flags = self.set.windowed
        windowed = block > 0 and flags[block % len(flags)]
        first = min(self.w0, lead_in(self.net, self.s, self.set.shift)) if windowed else 0
        end = self.w1 if windowed else self.total
        rows = np.arange(first, end)
        final, p, inputs = self.net.forward(self.x, rows, self.cache)
        old = self.layers
        self.layers = []
        for layer, hidden in enumerate(inputs):
            stored = old[layer].hidden if old else np.zeros((self.total, hidden.shape[1]))
            stored = stored.astype(hidden.dtype)
            stored[rows] = hidden
            self.layers.append(self.cluster(layer, stored))
        self.pending.clear()
        self.history: list[Array] = []
        read = self.readers(first)
        self.attention = p[:, read]
        self.finish(int(windowed), (first, end), final[read], None, [], [], {})

    def denoise(self, refresh: bool) -> None:
        net, first = self.net, lead_in(self.net, self.s, self.set.shift)
        rows = np.arange(first, self.e)
        x = net.embed(self.x[rows])
        packet: dict[int, Array] = {}
        if refresh:
            packet = {i: net.embed(self.x[i]) for i in sorted(self.pending)}
        selected = np.zeros((len(self.layers), self.total), bool)
        scores, tops, p = [], [], np.empty(0)
        for layer, state in enumerate(self.layers):
            if packet:
                self.apply(layer, state, packet)
            net.write(self.cache, layer, rows, x)
            x, p = net.layer(self.cache, layer, rows, x)
            if not refresh:
                continue
            now = self.proxy(layer, state)
            scores.append(cluster_drift(now, state.proxy))
            state.proxy = now
            last = layer == len(self.layers) - 1
            tops.append(
                rank_clusters(scores[-1], self.set.refresh_last if last else self.set.refresh)
            )
            selected[layer] = np.isin(state.labels, tops[-1])
            if layer == 0:
                selected[0, sorted(self.pending)] = True
                self.pending.clear()
            if self.force_selection is not None:
                selected[layer] = self.force_selection(len(self.passes), layer)
            chosen = np.flatnonzero(selected[layer])
            packet = {}
            if len(chosen):
                out, _ = net.layer(self.cache, layer, chosen, state.hidden[chosen])
                packet = dict(zip(chosen.tolist(), out))
        read = self.readers(first)
        drift = token_drift(p[:, read], self.attention)
        self.attention = p[:, read]
        extra = {}
        if packet:
            guess = net.predict(np.stack(list(packet.values())))
            extra = dict(zip(packet, guess))
        if refresh and net.config.shift_logits:
            # The row before a position predicts it; the block's last row predicts position e.
            extra = {i + 1: value for i, value in extra.items()}
            extra[self.e] = net.predict(x[-1:])[0]
        self.finish(2 + refresh, (first, self.e), x[read], drift, scores, tops, extra, selected)

    def apply(self, layer: int, state: Layer, packet: dict[int, Array]) -> None:
        """Write a packet's hidden inputs, keys and values; move the centroids it touches."""
        rows = np.array(list(packet))
        moved = np.zeros_like(state.centroids)
        for i, new in packet.items():
            if state.labels[i] >= 0:
                moved[state.labels[i]] += new - state.hidden[i]
            state.hidden[i] = new
        for c in set(state.labels[rows].tolist()) - {-1}:
            state.centroids[c] += moved[c] / self.net.dtype(state.counts[c])
        self.net.write(self.cache, layer, rows, state.hidden[rows])

    # --- commits -------------------------------------------------------------------------

    def finish(self, kind, rows, final, drift, scores, tops, extra, selected=None) -> None:
        s, mask = self.set, self.net.config.mask_token
        block = self.x[self.s : self.e]
        masked = block == mask
        p = self.net.predict(final)
        c, guess = p.max(-1), p.argmax(-1)
        sure = best(c, masked, 1) | (masked & (c >= s.tau))
        early = np.zeros_like(sure)
        delta = np.full(len(c), np.nan)
        if drift is not None:
            delta = drift - (np.mean(self.history, 0) if self.history else 0)
            self.history = [*self.history, drift][-s.history :]
            if s.early is not None:
                centre = s.tau if s.centre is None else s.centre
                gate = s.scale * np.maximum(0, centre - c) ** 2
                early = masked & ~sure & (c > s.early) & (c < s.tau)
                early &= (gate <= delta) & (delta < s.delta_max)
        before = self.x.copy()
        block[sure | early] = guess[sure | early]
        late = np.zeros(self.total, bool)
        for i, q in extra.items():
            if s.suffix and self.e <= i < self.total and before[i] == mask and q.max() >= s.tau:
                self.x[i] = q.argmax()
                late[i] = True
        if s.reembed:
            self.pending |= {i for i in np.flatnonzero(late).tolist() if i < self.w1}
        self.last = int((sure | early).sum())
        self.since += self.last
        self.done = s.stop_at_eos and finish_at_eos(self.x, self.start, self.net)
        nothing = np.zeros((len(self.layers), self.total), bool)
        self.passes.append(
            Pass(
                kind, rows, (self.s, self.e), masked, np.where(masked, c, np.nan), guess, sure,
                early, late, np.full(len(c), np.nan) if drift is None else drift, delta,
                nothing if selected is None else selected, scores, tops, self.x.copy(),
                [layer.centroids.copy() for layer in self.layers],
                [layer.labels.copy() for layer in self.layers],
                [layer.counts.copy() for layer in self.layers],
            )
        )  # fmt: skip
        if self.force_tokens is not None:
            self.x[:] = self.force_tokens(len(self.passes) - 1)

    def run(self) -> list[Pass]:
        s, mask = self.set, self.net.config.mask_token
        self.done = False
        for block in range((self.total - self.start) // s.block_length):
            self.locate(block)
            if self.done or not (self.x[self.s : self.e] == mask).any():
                continue
            self.since = self.last = 0
            self.open(block)
            while not self.done and (self.x[self.s : self.e] == mask).any():
                refresh = self.last > s.trigger_last or self.since > s.trigger_total
                if refresh:
                    self.since = 0
                self.denoise(refresh)
        return self.passes
