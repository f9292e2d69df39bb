// One chunk of keys for all L rows of all G heads of a key head: unnormalised output and its softmax statistics.
// Block by block of KB keys: scores (a simdgroup has a tile of 8 keys), softmax (a simdgroup has whole rows), output (a
// simdgroup has 8 NC columns). So each key and each value is read once. grid (32 NS, chunks, B Hq / G).

constexpr int ROWS = L * G;
constexpr int RT = (ROWS + 7) / 8;
constexpr int NS = D / (8 * NC);
constexpr int TILES = KB / 8;
// Where there are more simdgroups than tiles of keys, as many share a tile's rows between them.
constexpr int PARTS = NS >= TILES ? NS / TILES : 1;
constexpr int PART = (RT + PARTS - 1) / PARTS;
constexpr int STRIDE = KB + 8;  // rows a quarter of the banks apart
// Elements of a key that a lane loads at once: 16 bytes, or less where 8 lanes of them don't divide the head.
constexpr int MOST = 128 / BITS;
constexpr int E = D % (8 * MOST) == 0 ? MOST : D % (4 * MOST) == 0 ? MOST / 2 : D % (2 * MOST) == 0 ? MOST / 4 : 4;
constexpr int SUB = E < 8 ? E : 8;
constexpr int KEY_BYTES = E * BITS / 8;
constexpr int QUERY_BYTES = SUB * sizeof(T);
constexpr int VALUE_BYTES = 2 * NC * BITS / 8;
constexpr int ROW_BYTES = D * BITS / 8;

threadgroup float scores[RT * 8 * STRIDE];
threadgroup float row_max[RT * 8];
threadgroup float row_total[RT * 8];
threadgroup float row_rescale[RT * 8];

const int lane = thread_index_in_simdgroup;
const int simd = simdgroup_index_in_threadgroup;
const int thread_index = thread_position_in_threadgroup.x;
const int row = ((lane / 4) & 4) + (lane / 2) % 4;
const int column = ((lane / 4) & 2) * 2 + (lane % 2) * 2;

const int slot = threadgroup_position_in_grid.y;
const int slots = threadgroups_per_grid.y;
const int b = threadgroup_position_in_grid.z / (Hq / G);
const int group = threadgroup_position_in_grid.z % (Hq / G);
const int head = group * G / (Hq / Hkv);
const int capacity = keys_shape[2];
const size_t first_key = size_t(b * Hkv + head) * capacity;

// Chunks are counted from the first one that a row sees.
const int row0_position = start[b];
const int oldest = WINDOW ? max(row0_position - WINDOW + 1, 0) : 0;
const int chunk = chunk_of(oldest, CHUNK, MANY, REST) + slot;
const int begin = chunk_start(chunk, CHUNK, MANY, REST);
const int end = min(chunk_start(chunk + 1, CHUNK, MANY, REST), row0_position + L);
const size_t out_row = (size_t(b * (Hq / G) + group) * slots + slot) * ROWS;

for (int i = thread_index; i < RT * 8; i += 32 * NS) {
    row_max[i] = UNSEEN;
    row_total[i] = 0;
}
float2 output[RT][NC];
MLX_MTL_PRAGMA_UNROLL
for (int rt = 0; rt < RT; rt++) {
    MLX_MTL_PRAGMA_UNROLL
    for (int nt = 0; nt < NC; nt++) {
        output[rt][nt] = float2(0, 0);
    }
}

// This simdgroup's tiles of keys and of rows; those that are left over have none.
const int first_rt = simd / TILES * PART;
const int first_kt = first_rt < RT ? simd % TILES : TILES;
// Blocks lie on multiples of KB, whichever of them the window lets in.
const int block0 = oldest > begin ? begin + (oldest - begin) / KB * KB : begin;
for (int block = block0; block < end; block += KB) {
    for (int kt = first_kt; kt < TILES; kt += NS) {
        const int key0 = block + 8 * kt + column;
        float2 sum[PART];
        MLX_MTL_PRAGMA_UNROLL
        for (int i = 0; i < PART; i++) {
            sum[i] = float2(0, 0);
        }
        float2 key_scale = float2(scale, scale);
        if (block + 8 * kt < end) {
            // Clamped, not skipped: a compiler may hoist a load out of a branch. Beyond `end` the score is masked.
            const size_t key_a = first_key + min(key0, end - 1);
            const size_t key_b = first_key + min(key0 + 1, end - 1);
            if (FORMAT == INT8) {
                key_scale = key_scale * float2(float(key_scales[key_a]), float(key_scales[key_b]));
            }
            // Slot `row` of step i is element i of this lane's granule: 8 lanes share a key and load its line.
            const device uchar* bytes_a = (const device uchar*)keys + key_a * ROW_BYTES + row * KEY_BYTES;
            const device uchar* bytes_b = (const device uchar*)keys + key_b * ROW_BYTES + row * KEY_BYTES;
            Words<KEY_BYTES> next_a = load_words<KEY_BYTES>(bytes_a), next_b = load_words<KEY_BYTES>(bytes_b);
            for (int d0 = 0; d0 < D; d0 += 8 * E) {
                const int d = d0 + row * E;
                const Words<KEY_BYTES> words_a = next_a, words_b = next_b;
                if (d0 + 8 * E < D) {
                    next_a = load_words<KEY_BYTES>(bytes_a + (d0 / E + 8) * KEY_BYTES);
                    next_b = load_words<KEY_BYTES>(bytes_b + (d0 / E + 8) * KEY_BYTES);
                }
                float2 step = float2(1, 1), bias = float2(0, 0);
                if (FORMAT == AFFINE) {
                    const size_t at_a = key_a * (D / GROUP) + d / GROUP, at_b = key_b * (D / GROUP) + d / GROUP;
                    step = float2(float(key_scales[at_a]), float(key_scales[at_b]));
                    bias = float2(float(key_biases[at_a]), float(key_biases[at_b]));
                }
                MLX_MTL_PRAGMA_UNROLL
                for (int i0 = 0; i0 < E; i0 += SUB) {
                    float2 k[SUB];
                    MLX_MTL_PRAGMA_UNROLL
                    for (int i = 0; i < SUB; i++) {
                        k[i] = float2(
                            element<FORMAT, BITS, T>(words_a, i0 + i), element<FORMAT, BITS, T>(words_b, i0 + i));
                        if (FORMAT == AFFINE) {
                            k[i] = fma(k[i], step, bias);
                        }
                    }
                    MLX_MTL_PRAGMA_UNROLL
                    for (int part = 0; part < PART; part++) {
                        // Guarded, not left by `break`: the loop must unroll, or `sum` goes to memory.
                        if (RT % PARTS == 0 || first_rt + part < RT) {
                            const int r = min(8 * (first_rt + part) + row, ROWS - 1);
                            const size_t q_row = size_t(b * Hq + group * G + r % G) * L + r / G;
                            const device T* q_at = q + q_row * D + d0 + column * E + i0;
                            const Words<QUERY_BYTES> x = load_words<QUERY_BYTES>((const device uchar*)q_at);
                            const Words<QUERY_BYTES> y = load_words<QUERY_BYTES>((const device uchar*)(q_at + E));
                            MLX_MTL_PRAGMA_UNROLL
                            for (int i = 0; i < SUB; i++) {
                                const float2 a = float2(
                                    element<PLAIN, 8 * sizeof(T), T>(x, i), element<PLAIN, 8 * sizeof(T), T>(y, i));
                                multiply_add(sum[part], a, k[i]);
                            }
                        }
                    }
                }
            }
        }
        MLX_MTL_PRAGMA_UNROLL
        for (int part = 0; part < PART; part++) {
            const int rt = first_rt + part;
            if (rt < RT) {
                const int position = row0_position + min(8 * rt + row, ROWS - 1) / G;
                // Selected, never multiplied: a stale key may be NaN.
                const bool seen_a = sees<FIRST, WINDOW>(position, key0) && key0 < end;
                const bool seen_b = sees<FIRST, WINDOW>(position, key0 + 1) && key0 + 1 < end;
                threadgroup float* score = scores + (8 * rt + row) * STRIDE + 8 * kt + column;
                score[0] = seen_a ? sum[part].x * key_scale.x : UNSEEN;
                score[1] = seen_b ? sum[part].y * key_scale.y : UNSEEN;
            }
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    float value_scale[KB / 32];
    MLX_MTL_PRAGMA_UNROLL
    for (int i = 0; i < KB / 32; i++) {
        value_scale[i] = FORMAT == INT8 ? float(value_scales[first_key + min(block + lane + 32 * i, end - 1)]) : 1;
    }
    for (int r = simd; r < RT * 8; r += NS) {
        threadgroup float* score = scores + r * STRIDE + lane;
        float best = score[0];
        for (int i = 1; i < KB / 32; i++) {
            best = max(best, score[32 * i]);
        }
        const float before = row_max[r];
        best = max(before, simd_max(best));
        // A row that sees no key of the block, nor any before it.
        const bool none = best == UNSEEN;
        float total = 0;
        MLX_MTL_PRAGMA_UNROLL
        for (int i = 0; i < KB / 32; i++) {
            const float weight = none ? 0 : fast::exp2(score[32 * i] - best);
            total += weight;
            score[32 * i] = weight * value_scale[i];
        }
        total = simd_sum(total);
        const float rescale = none ? 1 : fast::exp2(before - best);
        simdgroup_barrier(mem_flags::mem_threadgroup);
        if (lane == 0) {
            row_max[r] = best;
            row_total[r] = fma(row_total[r], rescale, total);
            row_rescale[r] = rescale;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    MLX_MTL_PRAGMA_UNROLL
    for (int rt = 0; rt < RT; rt++) {
        const float rescale = row_rescale[8 * rt + row];
        MLX_MTL_PRAGMA_UNROLL
        for (int nt = 0; nt < NC; nt++) {
            output[rt][nt] = output[rt][nt] * rescale;
        }
    }
    const int d = 8 * NC * simd + column * NC;
    const device uchar* bytes = (const device uchar*)values + d * BITS / 8;
    Words<VALUE_BYTES> next = load_words<VALUE_BYTES>(bytes + (first_key + min(block + row, end - 1)) * ROW_BYTES);
    for (int kt = 0; kt < TILES && block + 8 * kt < end; kt++) {
        const int key = block + 8 * kt + row;
        const size_t at = first_key + min(key, end - 1);
        const Words<VALUE_BYTES> words = next;
        if (kt + 1 < TILES && block + 8 * kt + 8 < end) {
            next = load_words<VALUE_BYTES>(bytes + (first_key + min(key + 8, end - 1)) * ROW_BYTES);
        }
        float step = 1, bias = 0;
        if (FORMAT == AFFINE) {
            step = float(value_scales[at * (D / GROUP) + d / GROUP]);
            bias = float(value_biases[at * (D / GROUP) + d / GROUP]);
        }
        float2 v[NC];
        MLX_MTL_PRAGMA_UNROLL
        for (int nt = 0; nt < NC; nt++) {
            v[nt] = float2(element<FORMAT, BITS, T>(words, 2 * nt), element<FORMAT, BITS, T>(words, 2 * nt + 1));
            if (FORMAT == AFFINE) {
                v[nt] = fma(v[nt], float2(step, step), float2(bias, bias));
            }
        }
        MLX_MTL_PRAGMA_UNROLL
        for (int rt = 0; rt < RT; rt++) {
            const threadgroup float* weight = scores + (8 * rt + row) * STRIDE + 8 * kt + column;
            const float2 weights = float2(weight[0], weight[1]);
            MLX_MTL_PRAGMA_UNROLL
            for (int nt = 0; nt < NC; nt++) {
                multiply_add(output[rt][nt], weights, v[nt]);
            }
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

for (int i = thread_index; i < ROWS; i += 32 * NS) {
    stats[2 * (out_row + i)] = row_max[i];
    stats[2 * (out_row + i) + 1] = row_total[i];
}
MLX_MTL_PRAGMA_UNROLL
for (int rt = 0; rt < RT; rt++) {
    const int r = 8 * rt + row;
    if (r < ROWS) {
        device float2* out = (device float2*)(partial + (out_row + r) * D + 8 * NC * simd + column * NC);
        MLX_MTL_PRAGMA_UNROLL
        for (int nt = 0; nt < NC; nt++) {
            out[nt] = output[rt][nt];
        }
    }
}
