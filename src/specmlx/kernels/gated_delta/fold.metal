// Fold the first count[b] rows of the tape into S and write it. A simdgroup owns 4 R rows of S; grid
// (32, Dv / (4 R), B Hv). Nothing crosses simdgroups: no barrier. kernel.metal goes on from here, with S in registers.

constexpr int CHUNKS = Dk / 32;
const int lane = thread_position_in_threadgroup.x;
const int j = lane % 8;
const int row0 = thread_position_in_grid.y * 4 * R + lane / 8;
const int b = thread_position_in_grid.z / Hv;
const int h = thread_position_in_grid.z % Hv;
const int hk = h / (Hv / Hk);
const size_t S_head = size_t(b * Hv + h) * Dv * Dk;

Part<CHUNKS> s[R], k_row;
MLX_MTL_PRAGMA_UNROLL
for (int r = 0; r < R; r++) {
    const device float4* S_row = (const device float4*)(S + S_head + (row0 + 4 * r) * Dk);
    MLX_MTL_PRAGMA_UNROLL
    for (int c = 0; c < CHUNKS; c++) {
        s[r].at[c] = S_row[8 * c + j];
    }
}

const int n = count[b];
const int tape_rows = tape_k_shape[1];
for (int t = 0; t < n; t++) {
    const int at = b * tape_rows + t;
    load_row<CHUNKS, T>(tape_k + (at * Hk + hk) * Dk, j, k_row);
    const float g_t = tape_g[at * Hv + h];
    MLX_MTL_PRAGMA_UNROLL
    for (int r = 0; r < R; r++) {
        delta_step<CHUNKS, true>(s[r], k_row, g_t, tape_delta[(at * Hv + h) * Dv + row0 + 4 * r], 1);
    }
}
MLX_MTL_PRAGMA_UNROLL
for (int r = 0; r < R; r++) {
    device float4* S_row = (device float4*)(S_out + S_head + (row0 + 4 * r) * Dk);
    MLX_MTL_PRAGMA_UNROLL
    for (int c = 0; c < CHUNKS; c++) {
        S_row[8 * c + j] = s[r].at[c];
    }
}
