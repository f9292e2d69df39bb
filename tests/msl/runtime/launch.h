// What a launch is made of: buffers, findings, fibres, simdgroups.
#pragma once

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

// Written into the kernel's module by instrument.py, and by compiler.py.
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
struct Buffer {  // the same struct as simulator.py's
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

}  // namespace
