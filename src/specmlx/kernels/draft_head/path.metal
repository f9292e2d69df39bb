// The path through K candidates in each of S slots that is expected to keep most tokens, in one launch: grid (32 K, B).
// table[s][a][b] is the score of candidate b after candidate a of the slot before, then its probability.

const int lane = thread_index_in_simdgroup;
const int candidate = simdgroup_index_in_threadgroup;
const int thread_index = thread_position_in_threadgroup.x;
const int b = threadgroup_position_in_grid.y;
threadgroup float table[S * K * K];
threadgroup int choice[S * K];
threadgroup float rest[K];

// A simdgroup has a candidate's own row in registers and meets it with the rows of all that may stand before it.
constexpr int PARTS = (R + 31) / 32;
for (int s = 0; s < S; s++) {
    const int at = (b * S + s) * K;
    const size_t own = size_t(clamp(ids[at + candidate], 0, V - 1)) * R;
    float x[PARTS];
    MLX_MTL_PRAGMA_UNROLL
    for (int i = 0; i < PARTS; i++) {
        const int r = 32 * i + lane;
        x[i] = r < R ? float(after[own + min(r, R - 1)]) : 0;
        if (HAS_Z) {
            x[i] = x[i] * float(z[size_t(b * S + s) * R + min(r, R - 1)]);
        }
    }
    // Before the first slot stands the anchor alone.
    for (int a = 0; a < (s == 0 ? 1 : K); a++) {
        const int previous = s == 0 ? anchor[b] : ids[at - K + a];
        const size_t row = size_t(clamp(previous, 0, V - 1)) * R;
        float sum = 0;
        MLX_MTL_PRAGMA_UNROLL
        for (int i = 0; i < PARTS; i++) {
            sum = fma(float(before[row + min(32 * i + lane, R - 1)]), x[i], sum);
        }
        sum = simd_sum(sum);
        if (lane == 0) {
            table[(s * K + a) * K + candidate] = unary[at + candidate] + sum;
        }
    }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

if (thread_index < K) {
    rest[thread_index] = 0;
}
for (int i = thread_index; i < S * K; i += 32 * K) {
    if (i == 0 || i >= K) {
        threadgroup float* row = table + i * K;
        float most = row[0], total = 0;
        for (int c = 1; c < K; c++) {
            most = max(most, row[c]);
        }
        for (int c = 0; c < K; c++) {
            row[c] = precise::exp(row[c] - most);
            total += row[c];
        }
        for (int c = 0; c < K; c++) {
            row[c] = row[c] / total;
        }
    }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

// From the last slot: the best rest after candidate a is max over c of p(c | a) (1 + the best rest after c).
for (int s = S - 1; s >= 0; s--) {
    Best best = nothing();
    if (thread_index < (s == 0 ? 1 : K)) {
        for (int c = 0; c < K; c++) {
            const float p = table[(s * K + thread_index) * K + c];
            take(best, fma(p, rest[c], p), c);
        }
        choice[s * K + thread_index] = best.id;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (thread_index < K) {
        rest[thread_index] = best.value;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}
if (thread_index == 0) {
    int previous = 0;
    for (int s = 0; s < S; s++) {
        previous = clamp(choice[s * K + previous], 0, K - 1);
        tokens[b * S + s] = ids[(b * S + s) * K + previous];
    }
}
