// The K best of each segment of a row, in one pass over the logits: grid (THREADS, segments, rows).

const int lane = thread_index_in_simdgroup;
const int simd = simdgroup_index_in_threadgroup;
const int segment = threadgroup_position_in_grid.y;
const size_t row = threadgroup_position_in_grid.z;
threadgroup Best lists[THREADS / 32 * K];

const int first = segment * SEGMENT;
const int last = min(first + SEGMENT, V);
Best list = nothing(), least = nothing();
// All lanes go round equally often: offers are made together.
for (int v0 = first + 32 * W * simd; v0 < last; v0 += W * THREADS) {
    const int v = v0 + W * lane;
    const float4 logit = load_values<W>(logits + row * V + min(v, V - W));
    // Most of the time none of them all is good enough: one look for 32 W logits.
    const float most = W == 1 ? logit.x : max(max(logit.x, logit.y), max(logit.z, logit.w));
    if (!simd_any(most >= least.value)) {
        continue;
    }
    MLX_MTL_PRAGMA_UNROLL
    for (int i = 0; i < W; i++) {
        Best mine = nothing();
        if (v < last) {
            mine.value = logit[i];
            mine.id = v + i;
        }
        offer<K>(list, least, mine, lane);
    }
}
if (lane < K) {
    lists[simd * K + lane] = list;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (simd == 0) {
    for (int i = K; i < THREADS / 32 * K; i += 32) {
        Best mine = nothing();
        if (i + lane < THREADS / 32 * K) {
            mine = lists[i + lane];
        }
        offer<K>(list, least, mine, lane);
    }
    if (lane < K) {
        const size_t at = (row * threadgroups_per_grid.y + segment) * K + lane;
        values[at] = list.value;
        ids[at] = list.id;
    }
}
