// One slot of the Markov chain over the whole vocabulary: the token before it from the last slot's segments, its row of
// w1 gathered, and in one pass over w2 the logits, their bias and the best token of each segment.
// grid (THREADS, segments); eight lanes share a row of w2, which is read once for all B lanes. MAPPED: the head has a row
// for some of the target's tokens only, and target_ids says which.

constexpr int CHUNKS = R / 64;
const int lane = thread_index_in_simdgroup;
const int simd = simdgroup_index_in_threadgroup;
const int segment = threadgroup_position_in_grid.y;
const int segments = threadgroups_per_grid.y;
const int j = lane % 8;
threadgroup Best scratch[THREADS / 32];

float4 row[B][2 * CHUNKS];
Best best[B];
MLX_MTL_PRAGMA_UNROLL
for (int b = 0; b < B; b++) {
    const int previous = chosen(before_values, before_ids, b, before_ids_shape[1], w1_shape[0], lane);
    if (segment == 0 && thread_position_in_threadgroup.x == 0) {
        previous_tokens[b] = previous;
    }
    MLX_MTL_PRAGMA_UNROLL
    for (int c = 0; c < CHUNKS; c++) {
        load_eight(w1 + size_t(previous) * R + 64 * c + 8 * j, row[b][2 * c], row[b][2 * c + 1]);
    }
    best[b] = nothing();
}

const int last = min((segment + 1) * SEGMENT, V);
for (int v0 = segment * SEGMENT + 4 * simd; v0 < last; v0 += THREADS / 8) {
    const int v = min(v0 + lane / 8, V - 1);
    float bias[B];
    MLX_MTL_PRAGMA_UNROLL
    for (int b = 0; b < B; b++) {
        bias[b] = 0;
    }
    MLX_MTL_PRAGMA_UNROLL
    for (int c = 0; c < CHUNKS; c++) {
        float4 w[2];
        load_eight(w2 + size_t(v) * R + 64 * c + 8 * j, w[0], w[1]);
        MLX_MTL_PRAGMA_UNROLL
        for (int b = 0; b < B; b++) {
            MLX_MTL_PRAGMA_UNROLL
            for (int i = 0; i < 2; i++) {
                bias[b] = fma(w[i].x, row[b][2 * c + i].x, bias[b]);
                bias[b] = fma(w[i].y, row[b][2 * c + i].y, bias[b]);
                bias[b] = fma(w[i].z, row[b][2 * c + i].z, bias[b]);
                bias[b] = fma(w[i].w, row[b][2 * c + i].w, bias[b]);
            }
        }
    }
    MLX_MTL_PRAGMA_UNROLL
    for (int b = 0; b < B; b++) {
        float sum = bias[b];
        sum += simd_shuffle_xor(sum, 1);
        sum += simd_shuffle_xor(sum, 2);
        sum += simd_shuffle_xor(sum, 4);
        if (j == 0 && v0 + lane / 8 < last) {
            // Rounded where the reference rounds: the bias, then the sum.
            const size_t at = size_t(b * logits_shape[1] + slot) * V + v;
            const T logit = static_cast<T>(float(logits[at]) + float(static_cast<T>(sum)));
#ifdef KEEP_LOGITS
            biased[size_t(b) * V + v] = logit;
#endif
            float score = float(logit);
            if (NOISY) {
                score = fma(score, scale, float(noise[at]));
            }
            take(best[b], score, MAPPED ? target_ids[v] : v);
        }
    }
}
MLX_MTL_PRAGMA_UNROLL
for (int b = 0; b < B; b++) {
    best[b] = threadgroup_best(best[b], scratch, lane, simd, THREADS / 32);
    if (thread_position_in_threadgroup.x == 0) {
        values[b * segments + segment] = best[b].value;
        ids[b * segments + segment] = best[b].id;
    }
}
