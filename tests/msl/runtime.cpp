// Runs one compiled kernel: a fibre per thread, one threadgroup at a time, and a look at every memory access.
// Freestanding C++ (no headers), so that any clang compiles it.  Called by runner.py; x86-64 only (the fibre switch).

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long;

extern "C" {
void* mmap(void*, u64, int, int, int, long);
int munmap(void*, u64);
void* malloc(u64);
void* realloc(void*, u64);
void free(void*);
void* memset(void*, int, u64);
void* memcpy(void*, const void*, u64);
float expf(float);

// Written into the kernel's module by instrument.py, and by generate.py.
struct Site {
  u32 size, align, line, flags;  // flags: 1 store, 2 the pointer may leave the simulated buffers (constant, generic)
};
extern const Site msl_sites[];
void msl_entry(const u64* buffers, const u32* at);
__attribute__((visibility("default"))) u64 msl_operations[3];  // floating multiply-adds; other arithmetic; conversions (counted by the instrumented code)
}

namespace {

constexpr u64 SLOT = 1ul << 32, BEFORE = 1ul << 30, STACK = 128 << 10;
constexpr u32 THREADS = 1024, LANES = 32, NONE = ~0u, INITIAL = ~1u, SEVERAL = ~2u, ARENA = 512 << 10;

enum Kind : u32 { INPUT, OUTPUT, THREADGROUP };
enum Fault : u32 {
  OUT_OF_BOUNDS, WILD, MISALIGNED, WRITES_INPUT, UNINITIALISED, RACE, DIVERGENT_BARRIER, BARRIER_AFTER_EXIT,
  PARTIAL_SIMDGROUP, UNWRITTEN, THREADGROUP_MEMORY, SHUFFLE_FROM_NOWHERE
};

// Who touched a cell (an element of an output, a byte of threadgroup memory) last, and in which epochs.
// thread: a thread's index; 0x8000 | s for several threads of simdgroup s; 0xffff for several simdgroups.
struct Touch {
  u32 group, epoch, lanes_epoch;
  u16 thread;
};
struct Cell {
  Touch write, read;
};

struct Finding {
  u32 fault, site, buffer, thread, other, count;
  u32 group[3];
  long offset;
};

}  // namespace

extern "C" {
struct Buffer {  // the same struct as runner.py's
  void* data;
  u64 size;
  u32 kind, granule;  // granule: bytes of a cell
  u32 initialised, has_lines;
  u64 loads_bytes, simd_bytes, group_bytes, loads, lines, stores_bytes, stores, store_simd_bytes, store_lines;
  // the runtime's own
  u64 base;
  Cell* cells;
  u64* seen;
  u32* touched;
  u64 n_touched;
};
struct Launch {
  Buffer* buffers;
  u32 n_buffers;
  u32 grid[3], group[3];
  u32 n_findings, max_findings;
  Finding* findings;
  u64 barriers, simd_operations, matrix_operations, threadgroups, threadgroup_memory, wild;
};
}

namespace {

enum State : u32 { READY, AT_SIMD, AT_BARRIER, DONE };

struct Access {
  u64 offset;
  u32 site;
  u16 size, buffer;
};
struct Log {
  Access* at;
  u32 n, capacity;
};

struct Fibre {
  void* sp;
  State state;
  u32 site;        // where it waits
  u32 needs;       // how it waits: 1 = every lane must take part (matrix operations)
  u32 flags;       // of the barrier
  u32 at[32];      // what the kernel's attributes read
  Log log;
};

struct Simdgroup {
  u32 first, count;        // its fibres
  u32 phase, active[2];
  bool computed[2];
  u32 tg_epoch, device_epoch;
  alignas(16) u8 box[2][LANES][64];
  alignas(16) u8 result[2][512];
};

Launch* L;
Fibre fibres[THREADS];
Simdgroup simdgroups[THREADS / LANES];
u8* stacks;
void* scheduler_sp;
Fibre* now;
u32 n_threads, n_simdgroups;
u32 group_id, group_at[3];
u32 tg_epoch, device_epoch;  // counted over the whole launch
u64 region, buffer_addresses[64];
u32 arena_buffer, n_variables;
u64 arena_top, arena_used;  // where the next variable goes; the bytes of all
struct { u64 at, size; } arena_variables[64];  // `at` from the arena's start
bool stop;

extern "C" void msl_switch(void** from, void* to);
asm(R"(
.text
.globl msl_switch
.hidden msl_switch
.type msl_switch,@function
msl_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

u32 index_of(const Fibre* f) { return u32(f - fibres); }
Simdgroup& simdgroup_of(const Fibre* f) { return simdgroups[index_of(f) / LANES]; }

void report(Fault fault, u32 site, u32 buffer, long offset, u32 other) {
  for (u32 i = 0; i < L->n_findings; i++) {
    Finding& f = L->findings[i];
    if (f.fault == fault && f.site == site && f.buffer == buffer) {
      f.count++;
      return;
    }
  }
  if (L->n_findings == L->max_findings) return;
  Finding& f = L->findings[L->n_findings++];
  f = {fault, site, buffer, now ? index_of(now) : NONE, other, 1, {group_at[0], group_at[1], group_at[2]}, offset};
}

// ---- Races, and reads of what nobody wrote ----

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

// ---- Traffic: lanes log their accesses; a log is read column by column when the simdgroup meets ----

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

// ---- Fibres ----

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

// ---- What the instrumented kernel calls ----

extern "C" {

void msl_access(const void* p, u32 site) {
  const Site& s = msl_sites[site];
  const u64 address = u64(p), slot = (address - region) / SLOT;
  if (address < region || slot >= L->n_buffers) {
    if (s.flags & 2) return;
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
void msl_atomic(const void* p, u32 size) {
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
