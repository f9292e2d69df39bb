// Rejection: how many tokens stand, then in one pass over the row behind them the best of log(max(p - q, 0)) + noise
// (slot 0) and, for a row without residual, of log(p) + noise (slot 1): grid (THREADS, segments, B).

const int lane = thread_index_in_simdgroup;
const int simd = simdgroup_index_in_threadgroup;
const int segment = threadgroup_position_in_grid.y;
const int segments = threadgroups_per_grid.y;
const int b = threadgroup_position_in_grid.z;
threadgroup Best scratch[THREADS / 32];

// Every simdgroup looks at the whole proposal itself: two numbers a token.
int kept = L - 1;
if (lane < L - 1) {
    const int at = b * (L - 1) + lane;
    const int token = clamp(int(tokens[at]), 0, V - 1);
    const float q_token = POINT ? 1 : q[size_t(at) * V + token];
    kept = u[at] * q_token < p[size_t(b * L + lane) * V + token] ? L - 1 : lane;
}
kept = simd_min(kept);
if (segment == 0 && thread_position_in_threadgroup.x == 0) {
    accepted[b] = kept;
}

const bool rejected = kept < L - 1;
const int refused = rejected ? clamp(int(tokens[b * (L - 1) + kept]), 0, V - 1) : -1;
const size_t p_row = size_t(b * L + kept) * V;
const size_t q_row = size_t(b * (L - 1) + (rejected ? kept : 0)) * V;
const int last = min((segment + 1) * SEGMENT, V);
Best residual = nothing(), whole = nothing();
for (int v = segment * SEGMENT + W * int(thread_position_in_threadgroup.x); v < last; v += W * THREADS) {
    const float4 weight = load_values<W>(p + p_row + v);
    const float4 draw = load_values<W>(noise + size_t(b) * V + v);
    float4 drafted = float4(0, 0, 0, 0);
    if (rejected && !POINT) {
        drafted = load_values<W>(q + q_row + v);
    }
    MLX_MTL_PRAGMA_UNROLL
    for (int i = 0; i < W; i++) {
        take(whole, precise::log(weight[i]) + draw[i], v + i);
        if (rejected) {
            const float rest = weight[i] - (POINT ? float(v + i == refused) : drafted[i]);
            take(residual, precise::log(max(rest, 0.0f)) + draw[i], v + i);
        }
    }
}
residual = threadgroup_best(residual, scratch, lane, simd, THREADS / 32);
whole = threadgroup_best(whole, scratch, lane, simd, THREADS / 32);
if (thread_position_in_threadgroup.x == 0) {
    values[(2 * b) * segments + segment] = residual.value;
    ids[(2 * b) * segments + segment] = residual.id;
    values[(2 * b + 1) * segments + segment] = whole.value;
    ids[(2 * b + 1) * segments + segment] = whole.id;
}
