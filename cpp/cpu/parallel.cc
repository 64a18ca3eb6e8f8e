#include "cpu/parallel.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

#include "pantile/attention.h"

namespace pantile::cpu {
namespace {

constexpr int kSpins = 2000;          // of a worker before it sleeps: some 20 us
constexpr int kPausesPerYield = 256;  // of a thread that waits for another one's result

struct Loop {
  std::atomic<int> next{0};
  int items;
  ItemFunction function;
  void* context;

  Loop(int item_count, ItemFunction item_function, void* item_context)
      : items(item_count), function(item_function), context(item_context) {}

  void drain(int worker) {
    for (int item = next.fetch_add(1); item < items; item = next.fetch_add(1)) {
      function(item, worker, context);
    }
  }
};

inline void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Threads that sleep until there is a loop. They are never joined: at exit they are asleep, and
// what they look at is never freed.
class Pool {
 public:
  // Runs the loop on this thread and up to `workers` - 1 others. When another thread is using the
  // pool, this thread runs the loop alone.
  void run(Loop* loop, int workers) {
    std::unique_lock<std::mutex> in_use(in_use_, std::try_to_lock);
    if (!in_use.owns_lock()) {
      loop->drain(0);
      return;
    }
    open(loop, workers);
    loop->drain(0);
    close();
  }

 private:
  void open(Loop* loop, int workers) {
    const std::lock_guard<std::mutex> lock(state_);
    while (thread_count_ < workers - 1 && start_thread()) {
    }
    loop_ = loop;
    next_worker_ = 1;
    workers_ = workers;
    loops_opened_.fetch_add(1, std::memory_order_release);
    wake_.notify_all();
  }

  // Nobody enters any more; waits for those inside.
  void close() {
    std::unique_lock<std::mutex> lock(state_);
    loop_ = nullptr;
    left_.wait(lock, [this] { return inside_ == 0; });
  }

  bool start_thread() {
    try {
      std::thread([this] { serve(); }).detach();
    } catch (const std::system_error&) {
      return false;  // fewer threads do the same work
    }
    ++thread_count_;
    return true;
  }

  [[noreturn]] void serve() {
    std::uint64_t seen = 0;
    for (;;) {
      for (int i = 0; i < kSpins && loops_opened_.load(std::memory_order_acquire) == seen; ++i) {
        pause_core();
      }
      std::unique_lock<std::mutex> lock(state_);
      wake_.wait(lock, [&] { return loops_opened_.load(std::memory_order_relaxed) != seen; });
      seen = loops_opened_.load(std::memory_order_relaxed);
      if (loop_ == nullptr || next_worker_ >= workers_) {
        continue;
      }
      Loop* const loop = loop_;
      const int worker = next_worker_++;
      ++inside_;
      lock.unlock();
      loop->drain(worker);
      lock.lock();
      if (--inside_ == 0) {
        left_.notify_one();
      }
    }
  }

  std::mutex in_use_;  // held by the thread whose loop is open
  std::mutex state_;   // guards all below
  std::condition_variable wake_;
  std::condition_variable left_;
  std::atomic<std::uint64_t> loops_opened_{0};
  Loop* loop_ = nullptr;  // open for entering
  int next_worker_ = 0;
  int workers_ = 0;
  int inside_ = 0;
  int thread_count_ = 0;
};

std::atomic<Pool*> pool{nullptr};
std::atomic<ParallelFor> lent_loop{nullptr};

// Made on first use. A child of fork() has none of its parent's threads, and its copy of the pool
// may be locked for ever: it forgets it.
Pool* the_pool() {
  Pool* current = pool.load(std::memory_order_acquire);
  if (current != nullptr) {
    return current;
  }
#if defined(__unix__) || defined(__APPLE__)
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { pool.store(nullptr, std::memory_order_relaxed); });
  static_cast<void>(registered);
#endif
  Pool* const made = new (std::nothrow) Pool;
  if (pool.compare_exchange_strong(current, made, std::memory_order_acq_rel)) {
    return made;
  }
  delete made;
  return current;
}

void run_piece(std::int64_t begin, std::int64_t, void* context) {
  static_cast<Loop*>(context)->drain(static_cast<int>(begin));
}

}  // namespace

Status for_each_item(int items, int workers, ItemFunction function, void* context) {
  Loop loop(items, function, context);
  if (workers <= 1 || items <= 1) {
    loop.drain(0);
    return Status();
  }
  if (const ParallelFor lent = lent_loop.load(std::memory_order_acquire)) {
    const std::int32_t result = lent(0, workers, 1, run_piece, &loop);
    if (result != 0) {
      return Status::error(StatusCode::device_error,
                           "the loop lent with set_parallel_for returned %d", result);
    }
    return Status();
  }
  Pool* const threads = the_pool();
  if (threads == nullptr) {
    loop.drain(0);
    return Status();
  }
  threads->run(&loop, workers);
  return Status();
}

void pause_while_waiting(int round) {
  if (round % kPausesPerYield == kPausesPerYield - 1) {
    std::this_thread::yield();
  } else {
    pause_core();
  }
}

}  // namespace pantile::cpu

namespace pantile {

void set_parallel_for(ParallelFor loop) {
  cpu::lent_loop.store(loop, std::memory_order_release);
}

}  // namespace pantile
