// Runs one compiled kernel: a fibre per thread, one threadgroup at a time, and a look at every memory access.
// Freestanding C++ (no system headers), so that any clang compiles it. Called by simulator.py; x86-64 only (the switch).
// Below: what the instrumented kernel calls.
#include "cells.h"
#include "scheduler.h"

// Bounds of this library, by the linker.
extern "C" __attribute__((visibility("hidden"))) const char __ehdr_start, _end;

// Constant tables and what lies on a fibre's stack or in the runtime, where constant and generic pointers may lead.
bool is_own(u64 address) {
  const u64 stack = address - u64(stacks);
  return (address >= u64(&__ehdr_start) && address < u64(&_end)) || stack < THREADS * STACK;
}

extern "C" {

void msl_access(const void* p, u32 site) {
  const Site& s = msl_sites[site];
  const u64 address = u64(p), slot = (address - region) / SLOT;
  if (address < region || slot >= L->n_buffers) {
    if (s.flags & 2 && is_own(address)) return;
    report(WILD, site, NONE, long(address), NONE);
    L->wild = stop = true;
    now->state = DONE;
    Fibre* me = now;
    now = nullptr;
    msl_switch(&me->sp, scheduler_sp);
  }
  Buffer& b = L->buffers[slot];
  const u64 offset = address - b.base;
  if (offset >= b.size || offset + s.size > b.size) return report(OUT_OF_BOUNDS, site, u32(slot), long(offset), NONE);
  if (b.kind == THREADGROUP) {
    bool inside = false;
    for (u32 i = 0; i < n_variables && !inside; i++)
      inside = offset >= arena_variables[i].at && offset + s.size <= arena_variables[i].at + arena_variables[i].size;
    if (!inside) return report(OUT_OF_BOUNDS, site, u32(slot), long(offset), NONE);
  }
  if (offset % s.align) report(MISALIGNED, site, u32(slot), long(offset), NONE);
  const bool store = s.flags & 1;
  if (b.kind == INPUT) {
    if (store) report(WRITES_INPUT, site, u32(slot), long(offset), NONE);
  } else {
    touch_cells(b, u32(slot), offset, site, store);
  }
  if (b.kind != THREADGROUP) log_access(u32(slot), offset, site);
  else if (store) b.stores_bytes += s.size;
  else b.loads_bytes += s.size;
}

// An atomic operation: in bounds, aligned; ordered with every other one, and seen as a write.
void msl_atomic(const volatile void* p, u32 size) {
  const u64 address = u64(p), slot = (address - region) / SLOT;
  if (address < region || slot >= L->n_buffers) return;
  Buffer& b = L->buffers[slot];
  const u64 offset = address - b.base;
  if (offset >= b.size || offset + size > b.size) return report(OUT_OF_BOUNDS, 0, u32(slot), long(offset), NONE);
  if (b.kind == INPUT) return report(WRITES_INPUT, 0, u32(slot), long(offset), NONE);
  for (u64 i = offset / b.granule; i <= (offset + size - 1) / b.granule; i++)
    if (b.cells[i].write.group == NONE || b.kind == THREADGROUP) b.cells[i].write = {INITIAL, 0, 0, 0};
}
u32 msl_atomic_get(const volatile u32* p) { return *p; }
void msl_atomic_set(volatile u32* p, u32 v) { *p = v; }

// Every lane leaves `size` bytes; when all have come, `active` says which did, and box(lane) reads theirs.
void msl_meet(const void* mine, u32 size, u32 site, u32 needs, u32 flags) {
  Simdgroup& s = simdgroup_of(now);
  if (size) memcpy(s.box[s.phase ^ 1][index_of(now) - s.first], mine, size);
  now->state = AT_SIMD;
  now->site = site, now->needs = needs, now->flags = flags;
  yield();
}
u32 msl_active() {
  Simdgroup& s = simdgroup_of(now);
  return s.active[s.phase];
}
u32 msl_lane() { return index_of(now) % LANES; }
const void* msl_box(u32 lane) {
  Simdgroup& s = simdgroup_of(now);
  return s.box[s.phase][lane];
}
// The place for a result that is the same for all lanes; null for the first lane, which has to compute it.
void* msl_result(bool* first) {
  Simdgroup& s = simdgroup_of(now);
  *first = !s.computed[s.phase];
  s.computed[s.phase] = true;
  return s.result[s.phase];
}
void msl_bad_shuffle(u32 site) { report(SHUFFLE_FROM_NOWHERE, site, NONE, 0, NONE); }

// D = A B + C of 8 x 8 matrices, 2 elements a lane each; one chain of fused multiply-adds in the order of k.
void msl_matrix(const float* mine, float* d, u32 site) {
  msl_meet(mine, 24, site, 1, 0);
  Simdgroup& s = simdgroup_of(now);
  bool first;
  float(*r)[8] = static_cast<float(*)[8]>(msl_result(&first));
  auto row = [](u32 l) { return ((l / 4) & 4) + (l / 2) % 4; };
  auto col = [](u32 l) { return ((l / 4) & 2) * 2 + (l % 2) * 2; };
  if (first) {
    float a[8][8] = {}, b[8][8] = {};
    for (u32 l = 0; l < LANES; l++) {
      const float* box = reinterpret_cast<const float*>(s.box[s.phase][l]);
      for (u32 e = 0; e < 2; e++)
        a[row(l)][col(l) + e] = box[e], b[row(l)][col(l) + e] = box[2 + e], r[row(l)][col(l) + e] = box[4 + e];
    }
    for (u32 i = 0; i < 8; i++)
      for (u32 k = 0; k < 8; k++)
        for (u32 j = 0; j < 8; j++) r[i][j] = __builtin_fmaf(a[i][k], b[k][j], r[i][j]);
    L->matrix_operations++;
  }
  const u32 l = msl_lane();
  d[0] = r[row(l)][col(l)], d[1] = r[row(l)][col(l) + 1];
}

void msl_barrier(u32 flags, u32 site) {
  now->state = AT_BARRIER;
  now->site = site, now->flags = flags;
  yield();
}

void* msl_threadgroup(u64 size, u64 align, u32 variable) {
  auto& v = arena_variables[variable];
  if (!v.size) {
    // A gap between two variables: a step out of one is not a step into the next.
    arena_top = (arena_top + align - 1) / align * align;
    v = {arena_top, size};
    arena_top += size + 1024;
    arena_used += size;
    n_variables = variable < n_variables ? n_variables : variable + 1;
    if (arena_used > 32768) report(THREADGROUP_MEMORY, 0, NONE, long(arena_used), NONE);
    if (arena_top > ARENA) __builtin_trap();
  }
  return reinterpret_cast<void*>(L->buffers[arena_buffer].base + v.at);
}
void msl_escape(const void*) {}

// x86-64 without AVX512-BF16 has no instruction for this; to nearest, ties to even.
__bf16 __truncsfbf2(float x) {
  u32 bits;
  memcpy(&bits, &x, 4);
  u16 r = u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  if ((bits & 0x7fffffff) > 0x7f800000) r = u16(bits >> 16 | 0x40);
  __bf16 y;
  memcpy(&y, &r, 2);
  return y;
}

__attribute__((visibility("default"))) int msl_run(Launch* launch) {
  L = launch;
  stop = false;
  now = nullptr;
  group_id = tg_epoch = device_epoch = n_variables = 0;
  for (u64& n : msl_operations) n = 0;
  // The last buffer is the threadgroup memory.  Pages around a buffer are readable, so that a kernel can go on.
  const u64 span = L->n_buffers * SLOT;
  void* r = mmap(nullptr, span, 3, 0x4022, -1, 0);  // read and write; private, anonymous, no reserve
  if (r == reinterpret_cast<void*>(-1)) return 1;
  region = u64(r);
  stacks = static_cast<u8*>(mmap(nullptr, THREADS * STACK, 3, 0x4022, -1, 0));
  memset(simdgroups, 0, sizeof simdgroups);
  for (Fibre& f : fibres) f.log = {};
  for (u32 i = 0; i < L->n_buffers; i++) {
    Buffer& b = L->buffers[i];
    b.base = region + i * SLOT + BEFORE;
    buffer_addresses[i] = b.size || b.kind == THREADGROUP ? b.base : 0;
    if (b.kind == THREADGROUP) arena_buffer = i, b.size = ARENA;
    if (b.kind == OUTPUT && !b.initialised) memset(reinterpret_cast<void*>(b.base), 0xff, b.size);
    else if (b.kind != THREADGROUP) memcpy(reinterpret_cast<void*>(b.base), b.data, b.size);
    else memset(reinterpret_cast<void*>(b.base), 0xff, b.size);
    b.cells = nullptr;
    if (b.kind != INPUT) {
      const u64 n = b.size / b.granule + 1;
      b.cells = static_cast<Cell*>(malloc(n * sizeof(Cell)));
      for (u64 j = 0; j < n; j++) b.cells[j] = {{b.initialised ? INITIAL : NONE, 0, 0, 0}, {NONE, 0, 0, 0}};
    }
    const u64 words = b.size / 64 + 2;
    b.seen = static_cast<u64*>(malloc(words * 8));
    memset(b.seen, 0, words * 8);
    b.touched = static_cast<u32*>(malloc(words * 4));
    b.n_touched = 0;
  }
  const u32* grid = L->grid;
  u32 groups[3];
  for (u32 d = 0; d < 3; d++) groups[d] = (grid[d] + L->group[d] - 1) / L->group[d];
  for (group_at[2] = 0; group_at[2] < groups[2]; group_at[2]++)
    for (group_at[1] = 0; group_at[1] < groups[1]; group_at[1]++)
      for (group_at[0] = 0; group_at[0] < groups[0] && !stop; group_at[0]++, group_id++) {
        u32 size[3];
        for (u32 d = 0; d < 3; d++) {
          const u32 left = grid[d] - group_at[d] * L->group[d];
          size[d] = left < L->group[d] ? left : L->group[d];
        }
        n_threads = size[0] * size[1] * size[2];
        for (u32 i = 0; i < n_threads; i++) set_attributes(fibres[i], grid, size, groups);
        run_group();
        L->threadgroups++;
      }
  for (u32 i = 0; i < L->n_buffers; i++) {
    Buffer& b = L->buffers[i];
    if (b.kind == OUTPUT) {
      u64 unwritten = 0, first = 0;
      for (u64 j = b.size / b.granule; j-- > 0;)
        if (b.cells[j].write.group == NONE) unwritten++, first = j;
      if (unwritten && !stop) {
        report(UNWRITTEN, 0, i, long(first * b.granule), NONE);
        L->findings[L->n_findings - 1].count = u32(unwritten);
      }
      memcpy(b.data, reinterpret_cast<void*>(b.base), b.size);
    }
    free(b.cells);
    free(b.seen);
    free(b.touched);
  }
  for (Fibre& f : fibres) free(f.log.at);
  munmap(stacks, THREADS * STACK);
  munmap(r, span);
  return 0;
}
}
