// The threads of one CUDA block as fibers of one OS thread; blocks are spread over OS threads.
//
// A fiber runs until it waits at a barrier or ends, so the order is the same in every run: forwards, or backwards on
// request, which brings out results that depend on the order between barriers. A block must not wait for another one.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

namespace gk_host {

constexpr unsigned WARP = 32;
constexpr unsigned char POISON = 0xA5;  // what unwritten dynamic shared memory and absent lanes read as
constexpr uint64_t STACK_END = 0x5AFEC0DE5AFEC0DEull;
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t STACK = 256 * 1024;
#else
constexpr size_t STACK = 32 * 1024;
#endif

enum class State { READY, AT_BLOCK_BARRIER, AT_WARP_BARRIER, DONE };

struct Fiber {
  void* stack_pointer;
  uint3 thread_index;
  unsigned linear;  // thread number in the block
  State state;
  unsigned mask;     // lanes that this fiber waits for at a warp barrier
  unsigned present;  // lanes that took part in the last warp barrier
  int vote;
};

struct Warp {
  unsigned live = 0;      // lanes that have not ended
  uint64_t pending[WARP]; // what each lane brings to the barrier it waits at
  uint64_t settled[WARP]; // what each lane brought to its last barrier; rewritten only after all its readers have run
};

struct Block {
  void* scheduler_stack_pointer = nullptr;
  Fiber* running = nullptr;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  char* stacks = nullptr;
  char* dynamic_shared = nullptr;
  void (*body)(void**) = nullptr;
  void** arguments = nullptr;
  int votes = 0;
  bool backwards = false;
  dim3 grid, dim;
  uint3 index{};

  char* stack(const Fiber& f) { return stacks + f.linear * STACK; }
};

inline thread_local Block* block;
inline std::mutex error_lock;
inline std::string error_text;

// The first error of a launch is the one that is told.
inline void fail(const std::string& text) {
  std::lock_guard<std::mutex> guard(error_lock);
  if (error_text.empty()) error_text = text;
}

// Callee-saved registers only: tens of nanoseconds, where swapcontext makes a system call.
#if defined(__x86_64__)
extern "C" void gk_host_switch(void** save, void* load);
__asm__(
    ".text\n.weak gk_host_switch\n.type gk_host_switch,@function\ngk_host_switch:\n"
    "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
    "mov %rsp,(%rdi)\nmov %rsi,%rsp\n"
    "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n"
    ".size gk_host_switch,.-gk_host_switch\n");
constexpr size_t SAVED_REGISTERS = 6;
#else
#error "running kernels on the CPU needs an x86-64 processor: gk_host_switch is not written for this one"
#endif

// AddressSanitizer has to be told of every change of stack.
#if defined(__SANITIZE_ADDRESS__)
extern "C" void __sanitizer_start_switch_fiber(void**, const void*, size_t);
extern "C" void __sanitizer_finish_switch_fiber(void*, const void**, size_t*);
extern "C" void __asan_unpoison_memory_region(void const volatile*, size_t);
inline thread_local const void* scheduler_bottom;
inline thread_local size_t scheduler_size;
inline void leave(void** fake, const void* bottom, size_t size) { __sanitizer_start_switch_fiber(fake, bottom, size); }
inline void arrive(void* fake, const void** bottom, size_t* size) {
  __sanitizer_finish_switch_fiber(fake, bottom, size);
}
inline void forget(void* at, size_t size) { __asan_unpoison_memory_region(at, size); }
#else
inline const void* scheduler_bottom;
inline size_t scheduler_size;
inline void leave(void**, const void*, size_t) {}
inline void arrive(void*, const void**, size_t*) {}
inline void forget(void*, size_t) {}
#endif

inline void to_scheduler() {
  Fiber* me = block->running;
  void* fake = nullptr;
  leave(me->state == State::DONE ? nullptr : &fake, scheduler_bottom, scheduler_size);
  gk_host_switch(&me->stack_pointer, block->scheduler_stack_pointer);
  arrive(fake, nullptr, nullptr);
}

inline void to_fiber(Block& b, Fiber& f) {
  void* fake = nullptr;
  b.running = &f;
  leave(&fake, b.stack(f), STACK);
  gk_host_switch(&b.scheduler_stack_pointer, f.stack_pointer);
  arrive(fake, nullptr, nullptr);
}

inline void fiber_main() {
  arrive(nullptr, &scheduler_bottom, &scheduler_size);
  block->body(block->arguments);
  block->running->state = State::DONE;
  to_scheduler();
  std::abort();
}

inline unsigned lane() { return block->running->linear % WARP; }
inline Warp& warp() { return block->warps[block->running->linear / WARP]; }

inline void block_barrier(int vote = 0) {
  block->running->vote = vote;
  block->running->state = State::AT_BLOCK_BARRIER;
  to_scheduler();
}

inline void warp_barrier(unsigned mask) {
  block->running->mask = mask;
  block->running->state = State::AT_WARP_BARRIER;
  to_scheduler();
}

inline void start_fibers(Block& b) {
  for (Warp& w : b.warps) w.live = 0;
  for (unsigned t = 0; t < b.fibers.size(); ++t) {
    Fiber& f = b.fibers[t];
    f = Fiber{nullptr, {t % b.dim.x, t / b.dim.x % b.dim.y, t / (b.dim.x * b.dim.y)}, t, State::READY, 0, 0, 0};
    forget(b.stack(f), STACK);
    memcpy(b.stack(f), &STACK_END, sizeof STACK_END);
    void** top = reinterpret_cast<void**>(b.stack(f) + STACK) - 3;  // 8 mod 16 on entry, as after a call
    *top = nullptr;
    *--top = reinterpret_cast<void*>(&fiber_main);
    top -= SAVED_REGISTERS;
    memset(top, 0, SAVED_REGISTERS * sizeof *top);
    f.stack_pointer = top;
    b.warps[t / WARP].live |= 1u << (t % WARP);
  }
}

// Let go the lanes whose whole mask (less the lanes that ended) waits with the same mask.
inline bool release_lanes(Warp& w, Fiber* lanes, unsigned count) {
  bool any = false;
  for (unsigned l = 0; l < count; ++l) {
    if (lanes[l].state != State::AT_WARP_BARRIER) continue;
    unsigned mask = lanes[l].mask, group = mask & w.live;
    bool whole = true;
    for (unsigned k = 0; k < count; ++k)
      if (group >> k & 1) whole &= lanes[k].state == State::AT_WARP_BARRIER && lanes[k].mask == mask;
    if (!whole) continue;
    for (unsigned k = 0; k < count; ++k) {
      if (!(group >> k & 1)) continue;
      w.settled[k] = w.pending[k];
      lanes[k].present = group;
      lanes[k].state = State::READY;
    }
    any = true;
  }
  return any;
}

inline bool run_warp(Block& b, unsigned number) {
  Warp& w = b.warps[number];
  Fiber* lanes = &b.fibers[number * WARP];
  unsigned left = static_cast<unsigned>(b.fibers.size()) - number * WARP, count = left < WARP ? left : WARP;
  bool progress = false;
  do {
    for (unsigned i = 0; i < count; ++i) {
      unsigned l = b.backwards ? count - 1 - i : i;
      if (lanes[l].state != State::READY) continue;
      to_fiber(b, lanes[l]);
      progress = true;
      if (lanes[l].state == State::DONE) w.live &= ~(1u << l);
    }
  } while (release_lanes(w, lanes, count));
  return progress;
}

inline std::string place(const Block& b) {
  char text[64];
  snprintf(text, sizeof text, "block (%u, %u, %u)", b.index.x, b.index.y, b.index.z);
  return text;
}

inline void run_block(Block& b) {
  start_fibers(b);
  for (;;) {
    bool progress = false;
    unsigned live = 0, waiting = 0;
    unsigned warps = static_cast<unsigned>(b.warps.size());
    for (unsigned i = 0; i < warps; ++i) progress |= run_warp(b, b.backwards ? warps - 1 - i : i);
    for (const Fiber& f : b.fibers) live += f.state != State::DONE, waiting += f.state == State::AT_BLOCK_BARRIER;
    if (live == 0) break;
    if (waiting == live) {
      b.votes = 0;
      for (Fiber& f : b.fibers)
        if (f.state == State::AT_BLOCK_BARRIER) b.votes += f.vote, f.state = State::READY;
    } else if (!progress) {
      fail("deadlock in " + place(b) + ": of " + std::to_string(live) + " threads left, " + std::to_string(waiting) +
           " wait at a block barrier and the others at a warp barrier");
      return;
    }
  }
  for (const Fiber& f : b.fibers)
    if (memcmp(b.stack(f), &STACK_END, sizeof STACK_END)) fail("stack overflow in " + place(b));
}

struct Launch {
  void (*body)(void**);
  void** arguments;
  dim3 grid, dim;
  size_t shared_bytes;
  unsigned threads;  // OS threads, which take block after block
  bool backwards;
};

inline void run_blocks(const Launch& launch, std::atomic<unsigned>& next) {
  static thread_local std::unique_ptr<char[]> stacks;  // the calling thread keeps them for the next launch, not cleared
  static thread_local size_t stack_count = 0;
  const dim3 grid = launch.grid, dim = launch.dim;
  const unsigned size = dim.x * dim.y * dim.z, count = grid.x * grid.y * grid.z;
  if (stack_count < size) {
    stacks.reset(new char[(size + 1) * STACK]);  // one in front, which the lowest may overrun without harm
    stack_count = size;
  }
  Block b;
  b.stacks = stacks.get() + STACK, b.fibers.resize(size), b.warps.resize((size + WARP - 1) / WARP);
  b.body = launch.body, b.arguments = launch.arguments, b.grid = grid, b.dim = dim, b.backwards = launch.backwards;
  // Exactly the size asked for, so that the sanitizer sees the first byte beyond it.
  b.dynamic_shared = static_cast<char*>(::operator new(launch.shared_bytes, std::align_val_t(128)));
  block = &b;
  for (unsigned i; (i = next++) < count;) {
    const unsigned n = launch.backwards ? count - 1 - i : i;
    b.index = {n % grid.x, n / grid.x % grid.y, n / (grid.x * grid.y)};
    memset(b.dynamic_shared, POISON, launch.shared_bytes);
    run_block(b);
  }
  block = nullptr;
  ::operator delete(b.dynamic_shared, std::align_val_t(128));
}

inline bool run_grid(const Launch& launch) {
  error_text.clear();
  std::atomic<unsigned> next{0};
  std::vector<std::thread> others;
  const unsigned count = launch.grid.x * launch.grid.y * launch.grid.z;
  for (unsigned i = 1; i < launch.threads && i < count; ++i)
    others.emplace_back([&] { run_blocks(launch, next); });
  run_blocks(launch, next);
  for (std::thread& t : others) t.join();
  return error_text.empty();
}

}  // namespace gk_host
