"""How many proposed tokens the target keeps, and its own token after them: pure functions on arrays.

Shapes: B lanes, γ proposed tokens (γ >= 0), T = γ + 1 verified rows, V tokens in the vocabulary. Row t of the
target stands behind proposal token t; row γ, behind the whole proposal, is reached when all are accepted.
Nothing is read on the host. What lies in the rows after the first rejected token never matters, NaN included.
"""

from dataclasses import dataclass

import mlx.core as mx

from specmlx.kernels import accept

# What is wrong with the logits of a row: the target's own are NaN or +inf, or what the processors made of them is.
TARGETS, PROCESSED = 1, 2


@dataclass(frozen=True)
class Outcome:
    """What one round delivers: `accepted` [B] int32 leading proposal tokens, then `next_anchor` [B] int32.

    faults: [B, γ + 1] int32, what is wrong with each row's logits, 0 where nothing is. A row with a fault has no token.
    """

    accepted: mx.array
    next_anchor: mx.array
    faults: mx.array | None = None


def accept_match(tokens: mx.array, target_tokens: mx.array) -> Outcome:
    """Keep the proposal as far as it equals the target's own tokens (greedy, coupled, foreign sampler).

    Args:
        tokens: proposal, [B, γ] int.
        target_tokens: the target's token of every row, [B, γ + 1] int; row t was drawn after tokens[:, :t].
    """
    return Outcome(*accept.match(tokens, target_tokens))


def accept_rejection(
    tokens: mx.array, q: mx.array | None, p: mx.array, u: mx.array, residual_noise: mx.array
) -> Outcome:
    """Rejection sampling: delivered tokens have the target's distribution p (Leviathan et al. 2023, alg. 1).

    Token x of row t is kept while u q(x) < p(x), with probability min(1, p(x) / q(x)). The first one that is
    not is replaced by a draw from max(p - q, 0); after a whole proposal the last row's p is drawn from.

    Args:
        tokens: proposal, [B, γ] int; an id outside the vocabulary is the caller's to refuse.
        q: the distribution each token was sampled from, [B, γ, V] float32; None for tokens that were not
            sampled (a point mass: kept with probability p(x), the residual is p without x).
        p: the target's distribution of every row, [B, γ + 1, V] float32.
        u: uniform in [0, 1), [B, γ] float32.
        residual_noise: Gumbel noise for the one draw of the round, [B, V] float32.
    """
    return Outcome(*accept.rejection(tokens, q, p, u, residual_noise))
