// find_kernel() with a machine that pretends: where kernels come from, threads, processes,
// failures.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <atomic>
#include <deque>
#include <thread>

#include "jit/cache.h"
#include "jit/load.h"
#include "jit/store.h"
#include "support.h"

namespace pantile::jit {
namespace {

class StoreTest : public JitTest {
 protected:
  void SetUp() override {
    JitTest::SetUp();
    set_cache_folders(folder.c_str());
  }
  Machine machine() {
    Machine made;
    made.settings = read_settings;
    made.compile = [this](const Settings&, const Request& request, Image* image) {
      ++compiled;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      if (fails) {
        return Status::error(StatusCode::unavailable, "no NVRTC found");
      }
      *image = jit::image_of(request.source);
      return Status();
    };
    made.load = [this](const Image& image, const void** handle) {
      ++loaded;
      const std::lock_guard<std::mutex> lock(mutex);
      *handle = &images.emplace_back(image.code);
      return Status();
    };
    made.is_capturing = [this](void* stream) { return stream == &capturing; };
    return made;
  }
  // In a process that has nothing in memory.
  Status find(const std::string& source, void* stream = nullptr) {
    stores.push_back(std::make_unique<Store>(machine()));
    return stores.back()->find(request_of(source), stream, &kernel);
  }

  std::atomic<int> compiled{0}, loaded{0};
  bool fails = false;
  int capturing = 0;  // its address is a stream that is captured
  std::mutex mutex;
  std::deque<std::string> images;
  std::vector<std::unique_ptr<Store>> stores;
  const Kernel* kernel = nullptr;
};

TEST_F(StoreTest, CompilesThenReadsThenRemembers) {
  ASSERT_TRUE(find("source").ok());
  EXPECT_EQ(kernel->origin, "compiled");
  EXPECT_EQ(kernel->name, "kernel of source");
  EXPECT_EQ(kernel->registers, 168);
  EXPECT_EQ(kernel->spill_bytes, 4);
  EXPECT_EQ(kernel->shared_bytes, 48);
  EXPECT_EQ(kernel->advisories, "C7515");
  EXPECT_EQ(kernel->compiler, "nvrtc 13.0");
  EXPECT_GE(kernel->seconds, 0.02);
  EXPECT_EQ(*static_cast<const std::string*>(kernel->handle), image_of("source").code);

  ASSERT_TRUE(find("source").ok());
  EXPECT_EQ(kernel->origin, "disk: " + image_path(folder, image_key(request_of("source"))));
  EXPECT_EQ(kernel->registers, 168);
  EXPECT_LT(kernel->seconds, 0.02);
  EXPECT_EQ(compiled, 1);

  const Kernel* again = nullptr;
  ASSERT_TRUE(stores.back()->find(request_of("source"), nullptr, &again).ok());
  EXPECT_EQ(again, kernel);
  EXPECT_EQ(loaded, 2);
  ASSERT_TRUE(stores.back()->find(request_of("another"), nullptr, &again).ok());
  EXPECT_NE(again, kernel);
}

TEST_F(StoreTest, ThreadsShareOneCompile) {
  Store store(machine());
  std::vector<std::thread> threads;
  std::vector<const Kernel*> found(16);
  for (std::size_t i = 0; i < found.size(); ++i) {
    threads.emplace_back([&, i] {
      const std::string source = i % 2 == 0 ? "even" : "odd";
      EXPECT_TRUE(store.find(request_of(source), nullptr, &found[i]).ok());
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(compiled, 2);
  EXPECT_EQ(loaded, 2);
  for (std::size_t i = 2; i < found.size(); ++i) {
    EXPECT_EQ(found[i], found[i - 2]);
  }
}

TEST_F(StoreTest, ProcessesWriteTheSameFile) {
  std::vector<pid_t> children;
  for (int i = 0; i < 4; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      const bool ok =
          find("source").ok() && find("source").ok() && contains(kernel->origin, "disk: ");
      _exit(ok && Messages::get().warnings.empty() ? 0 : 1);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = -1;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  ASSERT_TRUE(find("source").ok());
  EXPECT_TRUE(contains(kernel->origin, "disk: ")) << kernel->origin;
}

TEST_F(StoreTest, DamagedFilesAreCompiledAgain) {
  ASSERT_TRUE(find("source").ok());
  const std::string path = image_path(folder, image_key(request_of("source")));
  write_text(path, read_text(path).substr(0, 200));
  Messages::get().clear();
  ASSERT_TRUE(find("source").ok());
  EXPECT_EQ(kernel->origin, "compiled");
  EXPECT_TRUE(contains(Messages::get().notes[0], path + " is damaged"));
  ASSERT_TRUE(find("source").ok());
  EXPECT_EQ(kernel->origin, "disk: " + path);
}

TEST_F(StoreTest, FoldersAreTriedInTheirOrder) {
  const std::string shipped = in_folder("shipped");
  const std::string first = in_folder("first");
  const std::string second = in_folder("second");
  write_text(in_folder("file"), "");
  std::string path;
  ASSERT_TRUE(write_image(second, image_of("source"), &path).ok());
  set_cache_folders((in_folder("file/none") + ":" + first + ":" + second).c_str());
  set_shipped_folders(shipped.c_str());
  ASSERT_TRUE(find("source").ok());
  EXPECT_EQ(kernel->origin, "disk: " + path);
  ASSERT_TRUE(write_image(shipped, image_of("source"), &path).ok());
  ASSERT_TRUE(find("source").ok());
  EXPECT_EQ(kernel->origin, "shipped: " + path);
  // A new one goes to the first folder that takes it, and never to the shipped ones.
  ASSERT_TRUE(find("new").ok());
  EXPECT_EQ(kernel->origin, "compiled");
  EXPECT_TRUE(std::filesystem::exists(image_path(first, image_key(request_of("new")))));
  EXPECT_TRUE(Messages::get().warnings.empty());
}

TEST_F(StoreTest, LookingSaysWhereAKernelComesFrom) {
  const auto look = [this](Store& store) {
    KernelState state;
    EXPECT_TRUE(store.look_up(request_of("source"), &state).ok());
    EXPECT_STREQ(state.name, request_of("source").name.c_str());
    return state;
  };
  Store first(machine());
  KernelState state = look(first);
  EXPECT_STREQ(state.origin, "not compiled yet");
  EXPECT_EQ(state.registers, 0);
  EXPECT_FALSE(state.in_memory);
  EXPECT_EQ(compiled + loaded, 0);  // looking does neither
  ASSERT_TRUE(first.find(request_of("source"), nullptr, &kernel).ok());
  state = look(first);
  EXPECT_STREQ(state.origin, "compiled");
  EXPECT_TRUE(state.in_memory);
  EXPECT_EQ(state.registers, kernel->registers);
  Store second(machine());
  state = look(second);
  EXPECT_EQ(std::string(state.origin),
            "disk: " + image_path(folder, image_key(request_of("source"))));
  EXPECT_FALSE(state.in_memory);
  EXPECT_EQ(state.registers, kernel->registers);
  EXPECT_EQ(state.spill_bytes, kernel->spill_bytes);
  EXPECT_EQ(compiled, 1);
  EXPECT_EQ(loaded, 1);
}

TEST_F(StoreTest, AFolderThatTakesNothingIsToldOnce) {
  write_text(in_folder("file"), "");
  set_cache_folders(in_folder("file/none").c_str());
  ASSERT_TRUE(find("source").ok());
  ASSERT_TRUE(find("source").ok());
  EXPECT_EQ(compiled, 2);
  ASSERT_EQ(Messages::get().warnings.size(), 1u);
  EXPECT_TRUE(contains(Messages::get().warnings[0], in_folder("file/none")));
  Messages::get().clear();
  set_cache_folders("");  // asked for
  ASSERT_TRUE(find("source").ok());
  EXPECT_TRUE(Messages::get().warnings.empty());
}

TEST_F(StoreTest, NothingIsLoadedFromAFolderOfEverybody) {
  ASSERT_TRUE(find("source").ok());
  ASSERT_EQ(chmod(folder.c_str(), 0777), 0);
  Messages::get().clear();
  ASSERT_TRUE(find("source").ok());
  EXPECT_EQ(kernel->origin, "compiled");
  ASSERT_FALSE(Messages::get().warnings.empty());
  EXPECT_TRUE(contains(Messages::get().warnings[0], folder)) << Messages::get().warnings[0];
}

TEST_F(StoreTest, CaptureNeedsTheKernelInMemory) {
  for (int i = 0; i < 2; ++i) {  // not on the disk, then there
    const Status status = find("source", &capturing);
    EXPECT_EQ(status.code(), StatusCode::unavailable);
    EXPECT_TRUE(contains(status.message(), "kernel of source")) << status.message();
    EXPECT_TRUE(contains(status.message(), "pantile.compile")) << status.message();
    ASSERT_TRUE(stores.back()->find(request_of("source"), nullptr, &kernel).ok());
  }
  EXPECT_EQ(loaded, 2);
  EXPECT_TRUE(stores.back()->find(request_of("source"), &capturing, &kernel).ok());
}

TEST_F(StoreTest, FailuresAreToldAndTriedAgain) {
  fails = true;
  Store store(machine());
  const Status status = store.find(request_of("source"), nullptr, &kernel);
  EXPECT_EQ(status.code(), StatusCode::unavailable);
  EXPECT_TRUE(contains(status.message(), "kernel of source")) << status.message();
  EXPECT_TRUE(contains(status.message(), "no NVRTC found")) << status.message();
  EXPECT_TRUE(contains(status.message(), "PANTILE_CACHE")) << status.message();
  EXPECT_EQ(kernel, nullptr);
  fails = false;
  EXPECT_TRUE(store.find(request_of("source"), nullptr, &kernel).ok());
}

// A log that waits for Python's lock must not be called by a thread that holds one of the store.
TEST_F(StoreTest, TheLogIsCalledWithoutALock) {
  static Store* current = nullptr;
  static bool again = false;
  Store store(machine());
  current = &store;
  again = true;
  set_log([](LogLevel, const char*) {
    if (std::exchange(again, false)) {  // would wait for ever for the thread that called it
      std::thread([] {
        const Kernel* same = nullptr;
        EXPECT_TRUE(current->find(request_of("source"), nullptr, &same).ok());
      }).join();
    }
  });
  EXPECT_TRUE(store.find(request_of("source"), nullptr, &kernel).ok());
  EXPECT_FALSE(again);
  EXPECT_EQ(compiled, 1);
}

TEST_F(StoreTest, RequestsAreChecked) {
  Store store(machine());
  const Status status = store.find(Request{"name", "source", "entry", 70}, nullptr, &kernel);
  EXPECT_EQ(status.code(), StatusCode::invalid_argument);
  EXPECT_TRUE(contains(status.message(), "arch 70")) << status.message();
  EXPECT_EQ(compiled, 0);
}

TEST_F(StoreTest, TheVariableChoosesWhatIsDone) {
  setenv("PANTILE_JIT", "cache", 1);
  Status status = find("source");
  EXPECT_EQ(status.code(), StatusCode::unavailable);
  EXPECT_TRUE(contains(status.message(), "PANTILE_JIT=cache")) << status.message();
  EXPECT_TRUE(contains(status.message(), folder)) << status.message();
  EXPECT_EQ(compiled, 0);
  setenv("PANTILE_JIT", "on", 1);
  ASSERT_TRUE(find("source").ok());
  setenv("PANTILE_JIT", "cache", 1);
  EXPECT_TRUE(find("source").ok());
  setenv("PANTILE_JIT", "off", 1);
  status = find("source");
  EXPECT_EQ(status.code(), StatusCode::unavailable);
  EXPECT_TRUE(contains(status.message(), "PANTILE_JIT=off")) << status.message();
  setenv("PANTILE_JIT", "yes", 1);
  status = find("source");
  EXPECT_EQ(status.code(), StatusCode::invalid_argument);
  EXPECT_TRUE(contains(status.message(), "PANTILE_JIT is 'yes'")) << status.message();
  EXPECT_EQ(compiled, 1);
}

TEST_F(StoreTest, AFailedLoadIsNoKernel) {
  Machine broken = machine();
  broken.load = [](const Image&, const void** handle) {
    return load_code("no code", "entry", handle);
  };
  Store store(broken);
  EXPECT_FALSE(store.find(request_of("source"), nullptr, &kernel).ok());
  EXPECT_EQ(kernel, nullptr);
}

TEST(Settings, FoldersOfTheEnvironment) {
  set_cache_folders(nullptr);
  Settings settings;
  setenv("PANTILE_CACHE", "/a::/b:", 1);
  ASSERT_TRUE(read_settings(&settings).ok());
  EXPECT_EQ(settings.cache, (std::vector<std::string>{"/a", "/b"}));
  setenv("PANTILE_CACHE", "", 1);
  ASSERT_TRUE(read_settings(&settings).ok());
  EXPECT_TRUE(settings.cache.empty());
  unsetenv("PANTILE_CACHE");
  setenv("XDG_CACHE_HOME", "/x", 1);
  ASSERT_TRUE(read_settings(&settings).ok());
  EXPECT_EQ(settings.cache, std::vector<std::string>{"/x/pantile/kernels"});
  setenv("XDG_CACHE_HOME", "relative", 1);
  setenv("HOME", "/home/somebody", 1);
  ASSERT_TRUE(read_settings(&settings).ok());
  EXPECT_EQ(settings.cache, std::vector<std::string>{"/home/somebody/.cache/pantile/kernels"});
  unsetenv("XDG_CACHE_HOME");
  set_cache_folders("/program");
  ASSERT_TRUE(read_settings(&settings).ok());
  EXPECT_EQ(settings.cache, std::vector<std::string>{"/program"});
  char text[16] = "";
  ASSERT_TRUE(cache_folders(text, sizeof text).ok());
  EXPECT_STREQ(text, "/program");
  EXPECT_EQ(cache_folders(text, 8).code(), StatusCode::invalid_argument);
  set_cache_folders(nullptr);
}

TEST(FindKernel, RefusesARequestBeforeAnythingElse) {
  const Kernel* kernel = nullptr;
  EXPECT_EQ(find_kernel(Request{"name", "", "entry", 90}, nullptr, &kernel).code(),
            StatusCode::invalid_argument);
}

}  // namespace
}  // namespace pantile::jit
