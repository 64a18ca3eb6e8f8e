// The thread pool: when it works, when it does not, and what it survives.
#include <gtest/gtest.h>

#if defined(__linux__)
#include <dirent.h>
#include <sys/wait.h>
#include <unistd.h>
#endif

#include <atomic>
#include <set>
#include <thread>
#include <vector>

#include "case.h"
#include "cpu/parallel.h"

namespace pantile::testing {
namespace {

struct Visits {
  std::vector<std::atomic<int>> items;
  std::vector<std::atomic<int>> inside;  // calls of each worker that are running
  std::atomic<bool> overlap{false};
  Visits(int item_count, int workers)
      : items(static_cast<std::size_t>(item_count)), inside(static_cast<std::size_t>(workers)) {}

  static void visit(int item, int worker, void* context) {
    auto* visits = static_cast<Visits*>(context);
    auto& inside = visits->inside.at(static_cast<std::size_t>(worker));
    if (inside.fetch_add(1) != 0) {
      visits->overlap = true;
    }
    visits->items.at(static_cast<std::size_t>(item)).fetch_add(1);
    inside.fetch_sub(1);
  }
  void expect_each_once() const {
    for (const auto& count : items) {
      EXPECT_EQ(count.load(), 1);
    }
    EXPECT_FALSE(overlap.load());
  }
};

TEST(Loop, VisitsEachItemOnceWithItsOwnWorker) {
  for (const int workers : {1, 2, 7}) {
    for (const int items : {0, 1, 2, 6, 1000}) {
      for (int repeat = 0; repeat < 20; ++repeat) {
        Visits visits(items, workers);
        EXPECT_TRUE(cpu::for_each_item(items, workers, Visits::visit, &visits).ok());
        visits.expect_each_once();
      }
    }
  }
}

TEST(Loop, MayBeCalledFromSeveralThreads) {
  std::vector<std::thread> callers;
  for (int t = 0; t < 4; ++t) {
    callers.emplace_back([] {
      for (int repeat = 0; repeat < 200; ++repeat) {
        Visits visits(50, 3);
        EXPECT_TRUE(cpu::for_each_item(50, 3, Visits::visit, &visits).ok());
        visits.expect_each_once();
      }
    });
  }
  for (std::thread& caller : callers) {
    caller.join();
  }
}

std::atomic<int> lent_calls{0};

std::int32_t run_backwards(std::int64_t begin, std::int64_t end, std::int64_t grain,
                           ParallelBody body, void* context) {
  ++lent_calls;
  for (std::int64_t i = end; i > begin; i -= grain) {
    body(std::max(begin, i - grain), i, context);
  }
  return 0;
}

std::int32_t fail(std::int64_t, std::int64_t, std::int64_t, ParallelBody, void*) {
  return 7;
}

TEST(Loop, UsesTheOneThatIsLent) {
  set_parallel_for(run_backwards);
  lent_calls = 0;
  Visits visits(100, 4);
  EXPECT_TRUE(cpu::for_each_item(100, 4, Visits::visit, &visits).ok());
  visits.expect_each_once();
  EXPECT_EQ(lent_calls.load(), 1);
  // A whole backward, whose work items wait for each other, on a loop that runs its pieces in turn.
  Shape shape;
  shape.rows = 500;
  shape.keys = 900;
  Case c(shape, 1);
  const Target target{Backend::cpu, CpuIsa::baseline, 4};
  const Outputs outputs = c.forward(target);
  const Gradients gradients = c.backward(target, outputs);
  EXPECT_EQ(lent_calls.load(), 4);
  set_parallel_for(nullptr);
  EXPECT_TRUE(gradients.q.same_bits(c.backward(target, outputs).q));
}

TEST(Loop, ReportsTheFailureOfTheOneThatIsLent) {
  set_parallel_for(fail);
  Visits visits(100, 4);
  const Status status = cpu::for_each_item(100, 4, Visits::visit, &visits);
  set_parallel_for(nullptr);
  EXPECT_EQ(status.code(), StatusCode::device_error);
  EXPECT_NE(std::string(status.message()).find("returned 7"), std::string::npos)
      << status.message();
}

#if defined(__linux__)
int thread_count() {
  int count = 0;
  DIR* directory = opendir("/proc/self/task");
  while (const dirent* entry = readdir(directory)) {
    count += entry->d_name[0] != '.';
  }
  closedir(directory);
  return count;
}

// Runs `body` in a child process and returns its exit status; -1 when it hung or crashed.
int in_child(int (*body)()) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    _exit(body());
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(Pool, SmallProblemsStartNoThread) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the thread sanitizer has a thread of its own, which would be counted";
#endif
  EXPECT_EQ(in_child([] {
              const int before = thread_count();
              Shape shape;
              shape.heads_k = 8;
              shape.rows = 8;
              shape.keys = 8;
              Case c(shape, 1);
              const Target target{Backend::cpu, CpuIsa::baseline, 8};
              c.backward(target, c.forward(target));
              const int small = thread_count();
              shape.rows = 1000;
              shape.keys = 1000;
              Case large(shape, 1);
              large.forward(Target{Backend::cpu, CpuIsa::baseline, 3});
              return small == before && thread_count() == before + 2 ? 0 : 1;
            }),
            0);
}

TEST(Pool, WorksInAForkedChild) {
  Visits visits(100, 3);
  EXPECT_TRUE(cpu::for_each_item(100, 3, Visits::visit, &visits).ok());
  EXPECT_EQ(in_child([] {
              Visits again(100, 3);
              return cpu::for_each_item(100, 3, Visits::visit, &again).ok() && !again.overlap ? 0
                                                                                              : 1;
            }),
            0);
}
#endif

}  // namespace
}  // namespace pantile::testing
