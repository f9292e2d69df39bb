// The K best of each segment of a row, in one pass over the logits: grid (THREADS, segments, rows).

const int lane = thread_index_in_simdgroup;
const int simd = simdgroup_index_in_threadgroup;
const int segment = threadgroup_position_in_grid.y;
const size_t row = threadgroup_position_in_grid.z;
threadgroup Best lists[THREADS / 32 * K];

const int first = segment * SEGMENT;
const int last = min(first + SEGMENT, V);
Best list = nothing();
// All lanes go round equally often: offers are made together.
for (int v0 = first + 32 * W * simd; v0 < last; v0 += W * THREADS) {
    const int v = v0 + W * lane;
    const float4 logit = load_values<W>(logits + row * V + min(v, V - W));
    MLX_MTL_PRAGMA_UNROLL
    for (int i = 0; i < W; i++) {
        Best mine = nothing();
        if (v < last) {
            mine.value = logit[i];
            mine.id = v + i;
        }
        offer<K>(list, mine, lane);
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
        offer<K>(list, mine, lane);
    }
    if (lane < K) {
        const size_t at = (row * threadgroups_per_grid.y + segment) * K + lane;
        values[at] = list.value;
        ids[at] = list.id;
    }
}
