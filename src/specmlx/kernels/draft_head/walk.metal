// All S slots of a walk in one launch: grid (32 K, B), a simdgroup a candidate. after's rows do not depend on the walk,
// before's row is read once a slot.

const int lane = thread_index_in_simdgroup;
const int candidate = simdgroup_index_in_threadgroup;
const int b = threadgroup_position_in_grid.y;
threadgroup float drawn[K];

int previous = anchor[b];
for (int s = 0; s < S; s++) {
    const int at = (b * S + s) * K;
    const size_t a_row = size_t(clamp(previous, 0, V - 1)) * R;
    const size_t b_row = size_t(clamp(ids[at + candidate], 0, V - 1)) * R;
    float bias = 0;
    for (int r = lane; r < R; r += 32) {
        float x = float(before[a_row + r]);
        if (HAS_Z) {
            x = x * float(z[size_t(b * S + s) * R + r]);
        }
        bias = fma(x, float(after[b_row + r]), bias);
    }
    const float score = unary[at + candidate] + simd_sum(bias);
    if (lane == 0) {
        scores[at + candidate] = score;
        drawn[candidate] = NOISY ? fma(score, scale, float(noise[at + candidate])) : score;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    Best best = nothing();
    if (lane < K) {
        take(best, drawn[lane], lane);
    }
    best = simd_best(best);
    previous = ids[at + min(best.id, K - 1)];
    if (thread_position_in_threadgroup.x == 0) {
        tokens[b * S + s] = previous;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}
