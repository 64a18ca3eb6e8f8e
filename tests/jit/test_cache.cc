// Folders of compiled kernels: damage, distrust, and writers at the same time.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <atomic>
#include <thread>

#include "jit/cache.h"
#include "support.h"

namespace pantile::jit {
namespace {

class Cache : public JitTest {
 protected:
  Found read(const std::string& from, const Image& image) {
    read_ = Image();
    why_.clear();
    return read_image(from, image.key, &read_, &why_);
  }
  std::string write(const std::string& to, const Image& image) {
    std::string path;
    const Status status = write_image(to, image, &path);
    EXPECT_TRUE(status.ok()) << status.message();
    return path;
  }
  int files() const {
    int count = 0;
    for ([[maybe_unused]] const auto& file : std::filesystem::directory_iterator(folder)) {
      ++count;
    }
    return count;
  }

  Image read_;
  std::string why_;
};

TEST_F(Cache, GivesBackWhatWasWritten) {
  const Image image = image_of("source");
  EXPECT_EQ(read(folder, image), Found::nothing);
  const std::string path = write(folder, image);
  EXPECT_EQ(path, image_path(folder, image.key));
  ASSERT_EQ(read(folder, image), Found::image);
  EXPECT_EQ(read_.code, image.code);
  EXPECT_EQ(read(folder, image_of("another source")), Found::nothing);
  EXPECT_EQ(files(), 1);  // no private file stays
}

TEST_F(Cache, MakesItsFolderForItsOwnerAlone) {
  const std::string deep = in_folder("a/b/c");
  write(deep, image_of("source"));
  struct stat there;
  ASSERT_EQ(stat(deep.c_str(), &there), 0);
  EXPECT_EQ(there.st_mode & 0777u, 0700u);
  EXPECT_EQ(read(deep, image_of("source")), Found::image);
}

TEST_F(Cache, IgnoresDamagedFiles) {
  const Image image = image_of("source");
  const std::string path = write(folder, image);
  const std::string text = read_text(path);
  for (const std::string& damaged : {std::string(), text.substr(0, text.size() / 2), text + "x",
                                     std::string(text.size(), 'x')}) {
    write_text(path, damaged);
    EXPECT_EQ(read(folder, image), Found::broken);
    EXPECT_TRUE(contains(why_, path)) << why_;
  }
  write_text(path, encode(image_of("another source")));  // whole, but of another kernel
  EXPECT_EQ(read(folder, image), Found::broken);
  write(folder, image);  // the new file takes its place
  EXPECT_EQ(read(folder, image), Found::image);
}

TEST_F(Cache, DoesNotHangOrReadWhatIsNoFile) {
  const Image image = image_of("source");
  const std::string path = image_path(folder, image.key);
  ASSERT_EQ(mkdir(path.c_str(), 0700), 0);
  EXPECT_EQ(read(folder, image), Found::broken);
  ASSERT_EQ(rmdir(path.c_str()), 0);
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  EXPECT_EQ(read(folder, image), Found::broken);
}

TEST_F(Cache, RefusesWhatEverybodyMayWrite) {
  const Image image = image_of("source");
  const std::string path = write(folder, image);
  ASSERT_EQ(chmod(path.c_str(), 0666), 0);
  EXPECT_EQ(read(folder, image), Found::refused);
  EXPECT_TRUE(contains(why_, path + " can be written to by everybody")) << why_;
  ASSERT_EQ(chmod(path.c_str(), 0664), 0);  // a group is chosen on purpose
  EXPECT_EQ(read(folder, image), Found::image);
  ASSERT_EQ(chmod(folder.c_str(), 0777), 0);
  EXPECT_EQ(read(folder, image), Found::refused);
  EXPECT_TRUE(contains(why_, folder + " can be written to by everybody")) << why_;
  std::string unused;
  EXPECT_FALSE(write_image(folder, image, &unused).ok());
}

TEST_F(Cache, RefusesWhatBelongsToOthers) {
  if (geteuid() != 0) {
    GTEST_SKIP() << "only root can give a file away";
  }
  const Image image = image_of("source");
  const std::string path = write(folder, image);
  ASSERT_EQ(chown(path.c_str(), 12345, 0), 0);
  EXPECT_EQ(read(folder, image), Found::refused);
  EXPECT_TRUE(contains(why_, path + " belongs to user 12345")) << why_;
  ASSERT_EQ(chown(path.c_str(), 0, 0), 0);
  ASSERT_EQ(chown(folder.c_str(), 12345, 0), 0);
  EXPECT_EQ(read(folder, image), Found::refused);
}

TEST_F(Cache, ReadOnlyFoldersServe) {
  const Image image = image_of("source");
  const std::string path = write(folder, image);
  ASSERT_EQ(chmod(path.c_str(), 0444), 0);
  ASSERT_EQ(chmod(folder.c_str(), 0555), 0);
  EXPECT_EQ(read(folder, image), Found::image);
  ASSERT_EQ(chmod(folder.c_str(), 0755), 0);
}

TEST_F(Cache, SaysWhyAFolderTakesNothing) {
  const std::string file = in_folder("a file");
  write_text(file, "text");
  std::string unused;
  const Status below = write_image(file + "/folder", image_of("source"), &unused);
  EXPECT_TRUE(contains(below.message(), file)) << below.message();
  EXPECT_TRUE(contains(below.message(), "Not a directory")) << below.message();
}

TEST_F(Cache, ReadersSeeAWholeFileOrNone) {
  const Image image = image_of(std::string(200000, 's'));
  std::atomic<bool> done{false};
  std::atomic<int> seen{0};
  std::thread reader([&] {
    while (!done) {
      Image mine;
      std::string why;
      const Found found = read_image(folder, image.key, &mine, &why);
      ASSERT_TRUE(found == Found::image || found == Found::nothing) << why;
      seen += found == Found::image;
    }
  });
  std::vector<std::thread> writers;
  for (int i = 0; i < 2; ++i) {
    writers.emplace_back([&] {
      for (int j = 0; j < 20; ++j) {
        std::string path;
        EXPECT_TRUE(write_image(folder, image, &path).ok());
      }
    });
  }
  for (std::thread& writer : writers) {
    writer.join();
  }
  while (seen == 0) {
    std::this_thread::yield();
  }
  done = true;
  reader.join();
  EXPECT_EQ(files(), 1);
}

}  // namespace
}  // namespace pantile::jit
