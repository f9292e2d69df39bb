// Races, and reads of what nobody wrote.
#pragma once

#include "launch.h"

namespace {

bool ordered(const Touch& t, u32 epoch, u32 lanes_epoch, u32 me) {
  if (t.group != group_id) return t.group == NONE || t.group == INITIAL;
  if (t.epoch < epoch || t.thread == me) return true;
  if (t.thread == 0xffff) return false;
  u32 simdgroup = t.thread & 0x8000 ? t.thread & 0x7fff : t.thread / LANES;
  return simdgroup == me / LANES && t.lanes_epoch < lanes_epoch;
}

void touch_cells(Buffer& b, u32 buffer, u64 offset, u32 site, bool store) {
  const u32 me = index_of(now), size = msl_sites[site].size;
  const bool group_memory = b.kind == THREADGROUP;
  const u32 epoch = group_memory ? tg_epoch : device_epoch;
  Simdgroup& s = simdgroup_of(now);
  const u32 lanes_epoch = group_memory ? s.tg_epoch : s.device_epoch;
  for (u64 i = offset / b.granule; i <= (offset + size - 1) / b.granule; i++) {
    Cell& c = b.cells[i];
    if (group_memory && c.write.group != group_id) c.write.group = NONE;
    if (group_memory && c.read.group != group_id) c.read.group = NONE;
    if (!ordered(c.write, epoch, lanes_epoch, me)) report(RACE, site, buffer, long(offset), c.write.thread);
    if (store) {
      if (!ordered(c.read, epoch, lanes_epoch, me)) report(RACE, site, buffer, long(offset), c.read.thread);
      c.write = {group_id, epoch, lanes_epoch, u16(me)};
    } else {
      if (c.write.group == NONE) report(UNINITIALISED, site, buffer, long(offset), NONE);
      Touch& r = c.read;
      if (r.group != group_id && r.group != NONE) {
        r.group = SEVERAL;
      } else if (r.group == NONE || r.epoch < epoch) {
        r = {group_id, epoch, lanes_epoch, u16(me)};
      } else if (r.thread != me) {
        u32 simdgroup = r.thread & 0x8000 ? r.thread & 0x7fff : r.thread / LANES;
        bool same = r.thread != 0xffff && simdgroup == me / LANES;
        r.thread = same ? u16(0x8000 | simdgroup) : u16(0xffff);
        r.lanes_epoch = lanes_epoch;
      } else {
        r.lanes_epoch = lanes_epoch;
      }
    }
  }
}

}  // namespace
