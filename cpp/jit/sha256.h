// SHA-256 (FIPS 180-4): keys of kernels and checks of their files.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace pantile::jit {

class Sha256 {
 public:
  void update(const void* data, std::size_t bytes);
  void update(const std::string& text) { update(text.data(), text.size()); }
  std::string hex();  // of everything so far; the object is spent then

 private:
  void block(const unsigned char* bytes);

  std::array<std::uint32_t, 8> state_ = {0x6a09e667u, 0xbb67ae85u, 0x3c6ef372u, 0xa54ff53au,
                                         0x510e527fu, 0x9b05688cu, 0x1f83d9abu, 0x5be0cd19u};
  std::array<unsigned char, 64> rest_ = {};
  std::size_t rest_bytes_ = 0;
  std::uint64_t total_bytes_ = 0;
};

}  // namespace pantile::jit
