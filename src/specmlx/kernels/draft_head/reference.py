"""From a drafter's logits to its tokens where each token depends on the one before it, as the formulas read."""

from typing import NamedTuple

import mlx.core as mx


class Candidates(NamedTuple):
    """K candidates in each of S slots, with S_s(b | a) = unary_s(b) + sum_r before[a]_r z_s,r after[b]_r in float32.

    DFlash 2's selector, and with z None the Markov bias of DSpark on a shortlist. Shapes: unary (float32) and ids
    (int32) `[B, S, K]`, before and after `[V, R]`, anchor `[B]`, z `[B, S, R]`.
    """

    unary: mx.array
    ids: mx.array
    before: mx.array
    after: mx.array
    anchor: mx.array
    z: mx.array | None = None


def top_k(logits: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """The k largest logits `[..., k]` float32 of `[..., V]` in any order, and their ids int32."""
    ids = mx.argpartition(-logits, kth=k - 1, axis=-1)[..., :k].astype(mx.int32)
    return mx.take_along_axis(logits, ids, axis=-1).astype(mx.float32), ids


def chain(
    logits: mx.array,
    w1: mx.array,
    w2: mx.array,
    anchor: mx.array,
    noise: mx.array | None = None,
    scale: float = 1.0,
    target_ids: mx.array | None = None,
    keep_logits: bool = False,
) -> tuple[mx.array, mx.array | None]:
    """DSpark's Markov chain (arXiv 2607.05147): x_{s+1} = argmax(scale (U_s + w2 w1[x_s]) + noise_s), x_0 the anchor.

    Shapes: logits U `[B, S, V]`, w1 and w2 `[V, R]`, anchor `[B]`, noise `[B, S, V]` float32 (Gumbel, to draw at
    temperature 1 / scale). Where the head has a row for some of the target's tokens only, target_ids `[V]` int32 are
    theirs; w1 has a row for each of the target's, and of equal tokens the one with the smaller id counts.
    Returns tokens `[B, S]` int32 and, if they are to be kept, the logits with their bias `[B, S, V]`, in their dtype.
    """
    previous, tokens, biased = anchor, [], []
    for s in range(logits.shape[1]):
        biased.append(logits[:, s] + w1[previous] @ w2.T)
        score = biased[-1] if noise is None else biased[-1].astype(mx.float32) * scale + noise[:, s]
        if target_ids is None:
            previous = mx.argmax(score, axis=-1).astype(mx.int32)
        else:
            by_id = mx.argsort(target_ids)
            previous = target_ids[by_id][mx.argmax(score[:, by_id], axis=-1)]
        tokens.append(previous)
    return mx.stack(tokens, axis=1), mx.stack(biased, axis=1) if keep_logits else None


def walk(candidates: Candidates, noise: mx.array | None = None, scale: float = 1.0) -> tuple[mx.array, mx.array]:
    """A walk over the candidates: x_{s+1} = argmax over b of scale S_s(b | x_s) + noise_s(b), x_0 the anchor.

    noise: `[B, S, K]` float32. Returns tokens `[B, S]` int32 and the scores S `[B, S, K]` float32.
    """
    unary, ids, before, after, previous, z = candidates
    tokens, scores = [], []
    for s in range(unary.shape[1]):
        row = before[previous].astype(mx.float32)
        row = row if z is None else row * z[:, s].astype(mx.float32)
        scores.append(unary[:, s] + (after[ids[:, s]].astype(mx.float32) @ row[..., None])[..., 0])
        draw = scores[-1] if noise is None else scores[-1] * scale + noise[:, s]
        choice = mx.argmax(draw, axis=-1, keepdims=True)
        previous = mx.take_along_axis(ids[:, s], choice, axis=-1)[:, 0]
        tokens.append(previous)
    return mx.stack(tokens, axis=1), mx.stack(scores, axis=1)


def path(candidates: Candidates) -> mx.array:
    """The path `[B, S]` int32 of the greatest expected number of accepted tokens, by the scores of `walk`."""
    unary, ids, before, after, anchor, z = candidates
    first = mx.broadcast_to(anchor.astype(mx.int32)[:, None, None], ids[:, :1].shape)
    rows = before[mx.concatenate([first, ids[:, :-1]], axis=1)].astype(mx.float32)
    rows = rows if z is None else rows * z.astype(mx.float32)[:, :, None]
    tables = unary[..., None, :] + rows @ after[ids].astype(mx.float32).swapaxes(-1, -2)
    return mx.take_along_axis(ids, best_path(tables)[..., None], axis=-1)[..., 0]


def best_path(tables: mx.array) -> mx.array:
    """The path `[B, S]` (indices of candidates) of the greatest expected number of accepted tokens.

    tables: scores `[B, S, K, K]` of slot t's candidate (last axis) after slot t - 1's; of slot 0 the first row counts.
    With p_t(b | a) = softmax(S_t(. | a))(b), a path is expected to keep p_1 (1 + p_2 (1 + ...)) tokens: the best rest
    after a is W_t(a) = max over b of p_t(b | a) (1 + W_{t+1}(b)), and one pass from the last slot finds it exactly.
    """
    B, S, K, _ = tables.shape
    p = mx.softmax(tables, axis=-1, precise=True)
    rest, choices = mx.zeros((B, K)), []
    for t in reversed(range(S)):
        kept = p[:, t] * (1 + rest[:, None])
        choices.append(mx.argmax(kept, axis=-1))
        rest = kept.max(axis=-1)
    path = [choices.pop()[:, :1]]
    while choices:
        path.append(mx.take_along_axis(choices.pop(), path[-1], axis=1))
    return mx.concatenate(path, axis=1)
