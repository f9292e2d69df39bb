// The chunks of one row, in order: grid (D, L Hq, B), a thread for each column.

const int d = thread_position_in_grid.x;
const int t = thread_position_in_grid.y / Hq;
const int h = thread_position_in_grid.y % Hq;
const int b = thread_position_in_grid.z;
const int chunks = partial_shape[2];
const int rows = partial_shape[3];
const size_t first = size_t(b * (Hq / G) + h / G) * chunks * rows + t * G + h % G;

float best = UNSEEN;
for (int c = 0; c < chunks; c++) {
    best = max(best, stats[2 * (first + size_t(c) * rows)]);
}
float total = 0, sum = 0;
for (int c = 0; c < chunks; c++) {
    // A chunk that the row does not see has UNSEEN here, and weighs nothing.
    const size_t at = first + size_t(c) * rows;
    const float weight = fast::exp2(stats[2 * at] - best);
    total = fma(stats[2 * at + 1], weight, total);
    sum = fma(partial[at * D + d], weight, sum);
}
out[((size_t(b) * (rows / G) + t) * Hq + h) * D + d] = static_cast<T>(sum / total);
