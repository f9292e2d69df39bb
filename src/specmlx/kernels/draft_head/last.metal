// The token of the chain's last slot: grid (32, B).

const int b = threadgroup_position_in_grid.y;
const int last = chosen(values, ids, b, ids_shape[1], V, int(thread_index_in_simdgroup));
if (thread_index_in_simdgroup == 0) {
    token[b] = last;
}
