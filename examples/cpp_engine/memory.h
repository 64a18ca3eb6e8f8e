// Where the engine's tensors live: the heap, or a GPU.
#pragma once

#include <pantile/pantile.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#if defined(ENGINE_CUDA)
#include <cuda_runtime.h>
#endif

inline void must(const pantile::Status& status) {
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", status.message());
    std::exit(1);
  }
}

struct Memory {
  std::function<void*(std::size_t)> allocate;  // zeroed, at least 256-byte aligned
  std::function<void(void*)> release;
  std::function<void(void*, const void*, std::size_t)> upload, download;
};

inline Memory heap() {
  const auto copy = [](void* to, const void* from, std::size_t bytes) {
    std::memcpy(to, from, bytes);
  };
  return {[](std::size_t bytes) {
            const std::size_t rounded = (bytes + 255) / 256 * 256;
            return std::memset(std::aligned_alloc(256, rounded), 0, rounded);
          },
          [](void* pointer) { std::free(pointer); }, copy, copy};
}

#if defined(ENGINE_CUDA)
inline void must(cudaError_t error) {
  if (error != cudaSuccess) {
    std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
    std::exit(1);
  }
}

// Copies wait for the runs before them.
inline Memory gpu() {
  return {[](std::size_t bytes) {
            void* pointer = nullptr;
            must(cudaMalloc(&pointer, bytes));
            must(cudaMemset(pointer, 0, bytes));
            return pointer;
          },
          [](void* pointer) { must(cudaFree(pointer)); },
          [](void* to, const void* from, std::size_t bytes) {
            must(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice));
          },
          [](void* to, const void* from, std::size_t bytes) {
            must(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost));
          }};
}
#endif

// A block that grows on demand; what grows is zero.
class Block {
 public:
  explicit Block(const Memory& memory) : memory_(memory) {}
  ~Block() { clear(); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  void* of(std::size_t bytes) {
    if (bytes > bytes_) {
      clear();
      pointer_ = memory_.allocate(bytes);
      bytes_ = bytes;
    }
    return pointer_;
  }
  template <class T>
  T* upload(const std::vector<T>& values) {
    const std::size_t bytes = values.size() * sizeof(T);
    void* const pointer = of(bytes + sizeof(T));
    memory_.upload(pointer, values.data(), bytes);
    return static_cast<T*>(pointer);
  }

 private:
  void clear() {
    if (pointer_ != nullptr) {
      memory_.release(pointer_);
    }
    pointer_ = nullptr;
    bytes_ = 0;
  }

  const Memory& memory_;
  void* pointer_ = nullptr;
  std::size_t bytes_ = 0;
};
