// Traffic: lanes log their accesses; a log is read column by column when the simdgroup meets.
#pragma once

#include "launch.h"

namespace {

void log_access(u32 buffer, u64 offset, u32 site) {
  Log& g = now->log;
  if (g.n == g.capacity) {
    g.capacity = g.capacity ? 2 * g.capacity : 256;
    g.at = static_cast<Access*>(realloc(g.at, g.capacity * sizeof(Access)));
  }
  g.at[g.n++] = {offset, site, u16(msl_sites[site].size), u16(buffer)};
}

u64 see(Buffer& b, u64 from, u64 to) {  // how many of these bytes are new to the threadgroup
  u64 fresh = 0;
  while (from < to) {
    u64 word = from / 64, end = (word + 1) * 64 < to ? (word + 1) * 64 : to, n = end - from;
    u64 mask = (n == 64 ? ~0ul : ((1ul << n) - 1)) << (from % 64);
    if (!b.seen[word]) b.touched[b.n_touched++] = u32(word);
    fresh += u64(__builtin_popcountl(mask & ~b.seen[word]));
    b.seen[word] |= mask;
    from = end;
  }
  return fresh;
}

void count_instruction(Access* a, u32 n) {  // one instruction of a simdgroup: at most one access a lane
  Buffer& b = L->buffers[a[0].buffer];
  const bool store = msl_sites[a[0].site].flags & 1;
  for (u32 i = 1; i < n; i++)
    for (u32 j = i; j && a[j - 1].offset > a[j].offset; j--) {
      Access t = a[j];
      a[j] = a[j - 1];
      a[j - 1] = t;
    }
  u64 end = 0, bytes = 0, lines = 0, next_line = 0, fresh = 0, all = 0;
  for (u32 i = 0; i < n; i++) {
    u64 from = a[i].offset, to = from + a[i].size;
    all += a[i].size;
    u64 first = from / 128 > next_line ? from / 128 : next_line, last = (to - 1) / 128;
    if (last >= first) lines += last - first + 1, next_line = last + 1;
    if (from < end) from = end;
    if (to > from) {
      bytes += to - from;
      if (!store) fresh += see(b, from, to);
      end = to;
    }
  }
  if (store)
    b.stores_bytes += all, b.stores++, b.store_simd_bytes += bytes, b.store_lines += lines;
  else
    b.loads_bytes += all, b.loads++, b.simd_bytes += bytes, b.lines += lines, b.group_bytes += fresh;
}

void read_logs(Simdgroup& s) {
  Access column[LANES];
  // Lanes that took the same way have the same sites in the same order: a column is then one instruction.
  bool uniform = true;
  Log& lead = fibres[s.first].log;
  for (u32 l = 1; l < s.count && uniform; l++) {
    Log& g = fibres[s.first + l].log;
    uniform = g.n == lead.n;
    for (u32 i = 0; uniform && i < g.n; i++)
      uniform = g.at[i].site == lead.at[i].site && g.at[i].buffer == lead.at[i].buffer;
  }
  if (uniform) {
    for (u32 i = 0; i < lead.n; i++) {
      for (u32 l = 0; l < s.count; l++) column[l] = fibres[s.first + l].log.at[i];
      count_instruction(column, s.count);
    }
  } else {
    // Otherwise the n-th execution of a site by each lane is one instruction.
    u32 cursor[LANES] = {};
    for (;;) {
      Access* next = nullptr;
      for (u32 l = 0; l < s.count && !next; l++) {
        Log& g = fibres[s.first + l].log;
        while (cursor[l] < g.n && g.at[cursor[l]].size == 0) cursor[l]++;
        if (cursor[l] < g.n) next = &g.at[cursor[l]];
      }
      if (!next) break;
      const u32 site = next->site, buffer = next->buffer;
      u32 n = 0;
      for (u32 l = 0; l < s.count; l++) {
        Log& g = fibres[s.first + l].log;
        for (u32 i = cursor[l]; i < g.n; i++)
          if (g.at[i].size && g.at[i].site == site && g.at[i].buffer == buffer) {
            column[n++] = g.at[i];
            g.at[i].size = 0;
            break;
          }
      }
      count_instruction(column, n);
    }
  }
  for (u32 l = 0; l < s.count; l++) fibres[s.first + l].log.n = 0;
}

}  // namespace
