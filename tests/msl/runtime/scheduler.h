// Fibres of a threadgroup: who runs, who waits for whom.
#pragma once

#include "traffic.h"

namespace {

void yield() {
  // Straight on to the next lane that can run; the scheduler looks after the rest.
  Simdgroup& s = simdgroup_of(now);
  Fibre* me = now;
  for (u32 i = index_of(me) + 1; i < s.first + s.count; i++)
    if (fibres[i].state == READY) {
      now = &fibres[i];
      msl_switch(&me->sp, now->sp);
      return;
    }
  now = nullptr;
  msl_switch(&me->sp, scheduler_sp);
}

void fibre_main() {
  msl_entry(buffer_addresses, now->at);
  now->state = DONE;
  yield();
  __builtin_trap();
}

void start_fibre(Fibre& f) {
  u64 top = (u64(stacks) + (index_of(&f) + 1) * STACK) & ~63ul;
  void** sp = reinterpret_cast<void**>(top - 64);
  *--sp = nullptr;  // so that fibre_main starts with the stack aligned as after a call
  *--sp = reinterpret_cast<void*>(fibre_main);
  for (int i = 0; i < 6; i++) *--sp = nullptr;
  f.sp = sp;
  f.state = READY;
}

void resolve_simdgroup(Simdgroup& s) {
  u32 site = 0, n = 0, needs = 0;
  for (u32 l = 0; l < s.count; l++) {
    Fibre& f = fibres[s.first + l];
    if (f.state == AT_SIMD && !n) site = f.site;
    if (f.state == AT_SIMD && f.site == site) n++, needs = f.needs;
  }
  if (!n) return;
  u32 active = 0;
  for (u32 l = 0; l < s.count; l++) {
    Fibre& f = fibres[s.first + l];
    if (f.state == AT_SIMD && f.site == site) active |= 1u << l;
  }
  if (n < s.count || (needs && n < LANES)) {
    now = &fibres[s.first + u32(__builtin_ctz(active))];
    report(PARTIAL_SIMDGROUP, site, NONE, long(n), NONE);
    now = nullptr;
  }
  read_logs(s);
  s.phase ^= 1;
  s.active[s.phase] = active;
  s.computed[s.phase] = false;
  L->simd_operations++;
  u32 flags = 0;
  for (u32 l = 0; l < s.count; l++)
    if (active >> l & 1) fibres[s.first + l].state = READY, flags = fibres[s.first + l].flags;
  if (flags & 2) s.tg_epoch++;
  if (flags & 1) s.device_epoch++;
}

bool run_simdgroup(Simdgroup& s) {  // until every lane is at a barrier of the threadgroup, or done
  for (;;) {
    for (u32 l = 0; l < s.count && !stop; l++)
      if (fibres[s.first + l].state == READY) {
        now = &fibres[s.first + l];
        msl_switch(&scheduler_sp, now->sp);
      }
    if (stop) return false;
    bool waiting = false;
    for (u32 l = 0; l < s.count; l++) waiting |= fibres[s.first + l].state == AT_SIMD;
    if (!waiting) return true;
    resolve_simdgroup(s);
  }
}

void run_group() {
  tg_epoch++, device_epoch++;
  arena_top = arena_used = 0;
  memset(arena_variables, 0, sizeof arena_variables);
  n_simdgroups = (n_threads + LANES - 1) / LANES;
  for (u32 i = 0; i < n_simdgroups; i++) {
    Simdgroup& s = simdgroups[i];
    s.first = i * LANES;
    s.count = n_threads - s.first < LANES ? n_threads - s.first : LANES;
  }
  for (u32 i = 0; i < n_threads; i++) start_fibre(fibres[i]);
  for (;;) {
    for (u32 i = 0; i < n_simdgroups; i++)
      if (!run_simdgroup(simdgroups[i])) return;
    u32 waiting = 0, site = 0, flags = 3;
    bool same = true;
    Fibre* first = nullptr;
    for (u32 i = 0; i < n_threads; i++) {
      Fibre& f = fibres[i];
      if (f.state != AT_BARRIER) continue;
      if (!waiting++) site = f.site, first = &f;
      same &= f.site == site;
      flags &= f.flags;
    }
    if (!waiting) break;
    now = first;
    if (!same) report(DIVERGENT_BARRIER, site, NONE, waiting, NONE);
    else if (waiting < n_threads) report(BARRIER_AFTER_EXIT, site, NONE, waiting, NONE);
    now = nullptr;
    L->barriers++;
    if (flags & 2) tg_epoch++;
    if (flags & 1) device_epoch++;
    for (u32 i = 0; i < n_threads; i++)
      if (fibres[i].state == AT_BARRIER) fibres[i].state = READY;
  }
  for (u32 i = 0; i < n_simdgroups; i++) read_logs(simdgroups[i]);
  for (u32 i = 0; i < L->n_buffers; i++) {
    Buffer& b = L->buffers[i];
    for (u64 j = 0; j < b.n_touched; j++) b.seen[b.touched[j]] = 0;
    b.n_touched = 0;
  }
  if (arena_used > L->threadgroup_memory) L->threadgroup_memory = arena_used;
}

void set_attributes(Fibre& f, const u32 grid[3], const u32 size[3], const u32 groups[3]) {
  const u32 i = index_of(&f);
  const u32 in[3] = {i % size[0], i / size[0] % size[1], i / (size[0] * size[1])};
  u32* at = f.at;
  for (u32 d = 0; d < 3; d++) {
    at[d] = group_at[d] * L->group[d] + in[d];
    at[3 + d] = in[d];
    at[6 + d] = group_at[d];
    at[9 + d] = groups[d];
    at[12 + d] = grid[d];
    at[15 + d] = size[d];
    at[26 + d] = 0;
  }
  at[18] = i, at[19] = i / LANES, at[20] = i % LANES, at[21] = (n_threads + LANES - 1) / LANES;
  at[22] = i / 4, at[23] = i % 4, at[24] = (n_threads + 3) / 4, at[25] = LANES;
}

}  // namespace
