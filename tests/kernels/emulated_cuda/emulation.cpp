// The scheduler of emulated threads; see cuda_runtime.h.
#include "cuda_runtime.h"

#include <stdio.h>
#include <stdlib.h>
#include <ucontext.h>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

__attribute__((visibility("default"))) int32_t emulated_clusters = 1;

namespace emulated {
namespace {

constexpr unsigned kWarp = 32;
constexpr size_t kStackBytes = 64 * 1024;

enum class Wait { kNothing, kWarp, kBlock, kCluster, kFinished };

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  dim3 thread;
  Wait wait = Wait::kNothing;
  float lane_value = 0.0f;
};

// Where the operating-system threads of one cluster meet. One runs at a time, from the first to the last and back from
// barrier to barrier, so that a barrier that is missing shows.
class Meeting {
 public:
  explicit Meeting(unsigned size) : size_(size) {}
  void enter(unsigned rank) {
    std::unique_lock<std::mutex> lock(mutex_);
    await(lock, rank, 0);
  }
  void arrive(unsigned rank) {
    std::unique_lock<std::mutex> lock(mutex_);
    const unsigned round = round_;
    pass_on();
    await(lock, rank, round + 1);
  }
  void leave() {
    std::unique_lock<std::mutex> lock(mutex_);
    pass_on();
  }

 private:
  void await(std::unique_lock<std::mutex>& lock, unsigned rank, unsigned round) {
    condition_.wait(lock, [&] {
      const unsigned next = round_ % 2 == 0 ? arrived_ : size_ - 1 - arrived_;
      return round_ == round && next == rank;
    });
  }
  void pass_on() {
    if (++arrived_ == size_) {
      arrived_ = 0;
      ++round_;
    }
    condition_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable condition_;
  unsigned size_, arrived_ = 0, round_ = 0;
};

struct Cluster {
  explicit Cluster(unsigned size) : meeting(size), anchors(size), ended(size) {}
  Meeting meeting;
  std::vector<char*> anchors;  // by rank: where the block's own variables lie
  std::vector<bool> ended;     // by rank: the block's shared memory is gone
};

struct Block {
  std::vector<Fiber> fibers;
  Place place;
  Cluster* cluster = nullptr;
  const std::function<void()>* thread = nullptr;
  ucontext_t scheduler;
  Fiber* running = nullptr;
};

thread_local char anchor;
thread_local Block* current = nullptr;

void wait(Wait reason) {
  Fiber* self = current->running;
  self->wait = reason;
  swapcontext(&self->context, &current->scheduler);
}

void enter() {
  (*current->thread)();
  wait(Wait::kFinished);
}

// Whether all fibers [first, stop) that still run wait for `reason`, one at least.
bool all_wait(Block& block, size_t first, size_t stop, Wait reason) {
  bool any = false;
  for (size_t i = first; i < stop; ++i) {
    const Wait found = block.fibers[i].wait;
    if (found != reason && found != Wait::kFinished) return false;
    any = any || found == reason;
  }
  return any;
}

void release(Block& block, size_t first, size_t stop) {
  for (size_t i = first; i < stop; ++i) {
    if (block.fibers[i].wait != Wait::kFinished) block.fibers[i].wait = Wait::kNothing;
  }
}

void run_ready(Block& block, size_t first, size_t stop) {
  for (size_t i = first; i < stop; ++i) {
    Fiber& fiber = block.fibers[i];
    if (fiber.wait != Wait::kNothing) continue;
    block.running = &fiber;
    threadIdx = fiber.thread;
    swapcontext(&block.scheduler, &fiber.context);
  }
}

// Runs warps up to the barrier of the block, first to last and last to first in turn: a barrier that is missing shows.
void run_block(Block& block) {
  const size_t size = block.fibers.size(), num_warps = (size + kWarp - 1) / kWarp;
  for (bool backwards = false;; backwards = !backwards) {
    for (size_t i = 0; i < num_warps; ++i) {
      const size_t first = (backwards ? num_warps - 1 - i : i) * kWarp;
      const size_t stop = first + kWarp < size ? first + kWarp : size;
      run_ready(block, first, stop);
      while (all_wait(block, first, stop, Wait::kWarp)) {
        release(block, first, stop);
        run_ready(block, first, stop);
      }
    }
    if (all_wait(block, 0, size, Wait::kBlock)) {
      release(block, 0, size);
    } else if (all_wait(block, 0, size, Wait::kCluster)) {
      block.cluster->meeting.arrive(block.place.rank);
      release(block, 0, size);
    } else if (all_wait(block, 0, size, Wait::kFinished)) {
      return;
    } else {
      fprintf(stderr, "emulated block: its threads wait for each other for ever\n");
      abort();
    }
  }
}

void prepare(Fiber& fiber, dim3 thread) {
  fiber.thread = thread;
  fiber.wait = Wait::kNothing;
#ifdef __SANITIZE_ADDRESS__
  // The thread that had this stack before never returned from its functions.
  __asan_unpoison_memory_region(fiber.stack.get(), kStackBytes);
#endif
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = kStackBytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, enter, 0);
}

void start(Block& block) {
  for (unsigned i = 0; i < block.fibers.size(); ++i) prepare(block.fibers[i], dim3(i % blockDim.x, i / blockDim.x));
  run_block(block);
}

// All blocks of the grid that have this place in their cluster, one after the other.
void run_place(Cluster& cluster, Place place, dim3 grid, dim3 size, const std::function<void()>& thread) {
  Block block;
  block.fibers = std::vector<Fiber>(size.x * size.y);
  block.place = place;
  block.cluster = &cluster;
  block.thread = &thread;
  current = &block;
  blockDim = size;
  cluster.meeting.enter(place.rank);
  cluster.anchors[place.rank] = &anchor;
  cluster.meeting.arrive(place.rank);
  for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y) {
    for (blockIdx.x = place.rank; blockIdx.x < grid.x; blockIdx.x += place.size) {
      cluster.ended[place.rank] = false;
      start(block);
      cluster.ended[place.rank] = true;
      cluster.meeting.arrive(place.rank);
    }
  }
  cluster.meeting.leave();
}

}  // namespace

Place in_cluster() { return current->place; }
void block_barrier() { wait(Wait::kBlock); }
void cluster_barrier() { wait(Wait::kCluster); }

float shuffle_xor(float value, int mask) {
  Fiber* self = current->running;
  self->lane_value = value;
  wait(Wait::kWarp);
  const size_t index = static_cast<size_t>(self - current->fibers.data());
  const float found = current->fibers[index ^ static_cast<size_t>(mask)].lane_value;
  wait(Wait::kWarp);
  return found;
}

void* in_block(void* address, unsigned rank) {
  if (current->cluster->ended[rank]) {
    fprintf(stderr, "emulated cluster: a block reads the shared memory of block %u, which has ended\n", rank);
    abort();
  }
  return current->cluster->anchors[rank] + (static_cast<char*>(address) - &anchor);
}

void run(dim3 grid, dim3 block, unsigned cluster_size, const std::function<void()>& thread) {
  Cluster cluster(cluster_size);
  std::vector<std::thread> places;
  for (unsigned rank = 0; rank < cluster_size; ++rank) {
    places.emplace_back([&, rank] { run_place(cluster, Place{rank, cluster_size}, grid, block, thread); });
  }
  for (std::thread& place : places) place.join();
}

}  // namespace emulated
