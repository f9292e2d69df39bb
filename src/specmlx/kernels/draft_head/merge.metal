// The K best of a row from those of its segments: grid (32, rows).

const int lane = thread_index_in_simdgroup;
const size_t row = threadgroup_position_in_grid.y;
const int offered = values_shape[1] * K;

Best list = nothing(), least = nothing();
for (int i = 0; i < offered; i += 32) {
    Best mine = nothing();
    if (i + lane < offered) {
        mine.value = values[row * offered + i + lane];
        mine.id = ids[row * offered + i + lane];
    }
    offer<K>(list, least, mine, lane);
}
if (lane < K) {
    best_values[row * K + lane] = list.value;
    best_ids[row * K + lane] = list.id;
}
