// Behind fold.metal in one kernel: T rows from the folded S, which has been read once and written once by now.

const int rows = q_shape[1];
Part<CHUNKS> q_row;
for (int t = 0; t < rows; t++) {
    const int at = b * rows + t;
    load_row<CHUNKS, T>(k + (at * Hk + hk) * Dk, j, k_row);
    load_row<CHUNKS, T>(q + (at * Hk + hk) * Dk, j, q_row);
    const float g_t = g[at * Hv + h];
    const float beta_t = float(beta[at * Hv + h]);
    MLX_MTL_PRAGMA_UNROLL
    for (int r = 0; r < R; r++) {
        const int o = (at * Hv + h) * Dv + row0 + 4 * r;
        const float d = delta_step<CHUNKS, false>(s[r], k_row, g_t, float(v[o]), beta_t);
        const float out = row_dot<CHUNKS>(s[r], q_row);
        if (j == 0) {
            delta[o] = d;
            y[o] = static_cast<T>(out);
        }
    }
}
