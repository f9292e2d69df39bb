// The best token of each row in one pass over the scores: grid (THREADS, segments, B rows), a segment a threadgroup.

const int lane = thread_index_in_simdgroup;
const int simd = simdgroup_index_in_threadgroup;
const int segment = threadgroup_position_in_grid.y;
const size_t row = threadgroup_position_in_grid.z;
threadgroup Best scratch[THREADS / 32];

const int last = min((segment + 1) * SEGMENT, V);
Best best = nothing();
for (int v = segment * SEGMENT + W * int(thread_position_in_threadgroup.x); v < last; v += W * THREADS) {
    float4 score = load_values<W>(scores + row * V + v);
    if (NOISY) {
        score = score + load_values<W>(noise + row * V + v);
    }
    MLX_MTL_PRAGMA_UNROLL
    for (int i = 0; i < W; i++) {
        take(best, score[i], v + i);
    }
}
best = threadgroup_best(best, scratch, lane, simd, THREADS / 32);
if (thread_position_in_threadgroup.x == 0) {
    values[row * threadgroups_per_grid.y + segment] = best.value;
    ids[row * threadgroups_per_grid.y + segment] = best.id;
}
