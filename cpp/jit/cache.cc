#include "jit/cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>

namespace pantile::jit {
namespace {

constexpr off_t kLargestFile = off_t{64} << 20;  // a kernel has about 0.1 MB

// Empty, or why machine code that lies there is not to be trusted.
std::string distrust(const struct stat& what, const std::string& path) {
  if (what.st_uid != 0 && what.st_uid != geteuid()) {
    return path + " belongs to user " + std::to_string(what.st_uid) +
           "; it must belong to this user or to root";
  }
  if ((what.st_mode & S_IWOTH) != 0) {
    return path + " can be written to by everybody (chmod o-w)";
  }
  return "";
}

class File {
 public:
  File(const std::string& path, int flags, mode_t mode = 0)
      : descriptor_(open(path.c_str(), flags | O_CLOEXEC, mode)) {}
  ~File() {
    if (descriptor_ >= 0) {
      static_cast<void>(close(descriptor_));
    }
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  int get() const { return descriptor_; }
  // Whether everything written is in the file; on some file systems only close() says so.
  bool finish() {
    const int result = close(descriptor_);
    descriptor_ = -1;
    return result == 0;
  }

 private:
  int descriptor_;
};

bool read_all(int descriptor, std::string* text) {
  std::size_t done = 0;
  while (done < text->size()) {
    const ssize_t got = read(descriptor, &(*text)[done], text->size() - done);
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got <= 0) {
      return false;
    }
    done += static_cast<std::size_t>(got);
  }
  return true;
}

bool write_all(int descriptor, const std::string& text) {
  std::size_t done = 0;
  while (done < text.size()) {
    const ssize_t put = write(descriptor, text.data() + done, text.size() - done);
    if (put < 0 && errno == EINTR) {
      continue;
    }
    if (put <= 0) {
      return false;
    }
    done += static_cast<std::size_t>(put);
  }
  return true;
}

// As mkdir -p; folders that it makes are for their owner alone.
bool make_folders(const std::string& path) {
  for (std::size_t at = path.find('/', 1);; at = path.find('/', at + 1)) {
    const std::string part = path.substr(0, at);
    if (mkdir(part.c_str(), S_IRWXU) != 0 && errno != EEXIST) {
      struct stat there;
      if (stat(part.c_str(), &there) != 0) {
        return false;
      }
    }
    if (at == std::string::npos) {
      return true;
    }
  }
}

Status failure(const char* what, const std::string& path) {
  return Status::error(StatusCode::unavailable, "%s %s: %s", what, path.c_str(),
                       std::strerror(errno));
}

}  // namespace

std::string image_path(const std::string& folder, const std::string& key) {
  return folder + "/" + key + ".kernel";
}

Found read_image(const std::string& folder, const std::string& key, Image* image,
                 std::string* why) {
  struct stat there;
  if (stat(folder.c_str(), &there) != 0 || !S_ISDIR(there.st_mode)) {
    return Found::nothing;
  }
  const std::string path = image_path(folder, key);
  // O_NONBLOCK: a pipe of this name must not hang the process.
  const File file(path, O_RDONLY | O_NONBLOCK);
  struct stat read_file;
  if (file.get() < 0 || fstat(file.get(), &read_file) != 0) {
    return Found::nothing;
  }
  *why = distrust(there, folder);
  if (why->empty()) {
    *why = distrust(read_file, path);
  }
  if (!why->empty()) {
    return Found::refused;
  }
  if (!S_ISREG(read_file.st_mode) || read_file.st_size > kLargestFile) {
    *why = path + " is not the file of a kernel";
    return Found::broken;
  }
  std::string text(static_cast<std::size_t>(read_file.st_size), '\0');
  if (!read_all(file.get(), &text) || !decode(text, image) || image->key != key) {
    *why = path + " is damaged";
    return Found::broken;
  }
  return Found::image;
}

Status write_image(const std::string& folder, const Image& image, std::string* path) {
  if (!make_folders(folder)) {
    return failure("cannot make the folder", folder);
  }
  struct stat there;
  if (stat(folder.c_str(), &there) != 0) {
    return failure("cannot use the folder", folder);
  }
  const std::string reason = distrust(there, folder);
  if (!reason.empty()) {
    return Status::error(StatusCode::unavailable, "%s", reason.c_str());
  }
  // A name that no other thread, process or machine uses.
  static std::atomic<unsigned> count{0};
  char host[65] = "";
  static_cast<void>(gethostname(host, sizeof host - 1));
  *path = image_path(folder, image.key);
  const std::string mine = *path + "." + host + "." + std::to_string(getpid()) + "." +
                           std::to_string(count.fetch_add(1));
  File file(mine, O_WRONLY | O_CREAT | O_EXCL, S_IRUSR | S_IWUSR | S_IRGRP | S_IROTH);
  if (file.get() < 0) {
    return failure("cannot write", mine);
  }
  const bool written = write_all(file.get(), encode(image)) && file.finish();
  if (!written || std::rename(mine.c_str(), path->c_str()) != 0) {
    const Status status = failure("cannot write", *path);
    static_cast<void>(unlink(mine.c_str()));
    return status;
  }
  return Status();
}

}  // namespace pantile::jit
