#include "jit/sha256.h"

#include <algorithm>
#include <cstring>

namespace pantile::jit {
namespace {

constexpr std::uint32_t kRound[64] = {
    0x428a2f98u, 0x71374491u, 0xb5c0fbcfu, 0xe9b5dba5u, 0x3956c25bu, 0x59f111f1u, 0x923f82a4u,
    0xab1c5ed5u, 0xd807aa98u, 0x12835b01u, 0x243185beu, 0x550c7dc3u, 0x72be5d74u, 0x80deb1feu,
    0x9bdc06a7u, 0xc19bf174u, 0xe49b69c1u, 0xefbe4786u, 0x0fc19dc6u, 0x240ca1ccu, 0x2de92c6fu,
    0x4a7484aau, 0x5cb0a9dcu, 0x76f988dau, 0x983e5152u, 0xa831c66du, 0xb00327c8u, 0xbf597fc7u,
    0xc6e00bf3u, 0xd5a79147u, 0x06ca6351u, 0x14292967u, 0x27b70a85u, 0x2e1b2138u, 0x4d2c6dfcu,
    0x53380d13u, 0x650a7354u, 0x766a0abbu, 0x81c2c92eu, 0x92722c85u, 0xa2bfe8a1u, 0xa81a664bu,
    0xc24b8b70u, 0xc76c51a3u, 0xd192e819u, 0xd6990624u, 0xf40e3585u, 0x106aa070u, 0x19a4c116u,
    0x1e376c08u, 0x2748774cu, 0x34b0bcb5u, 0x391c0cb3u, 0x4ed8aa4au, 0x5b9cca4fu, 0x682e6ff3u,
    0x748f82eeu, 0x78a5636fu, 0x84c87814u, 0x8cc70208u, 0x90befffau, 0xa4506cebu, 0xbef9a3f7u,
    0xc67178f2u};

std::uint32_t rotate(std::uint32_t x, int by) {
  return x >> by | x << (32 - by);
}

}  // namespace

void Sha256::block(const unsigned char* bytes) {
  std::uint32_t w[64];
  for (int i = 0; i < 16; ++i) {
    w[i] = std::uint32_t{bytes[4 * i]} << 24 | std::uint32_t{bytes[4 * i + 1]} << 16 |
           std::uint32_t{bytes[4 * i + 2]} << 8 | std::uint32_t{bytes[4 * i + 3]};
  }
  for (int i = 16; i < 64; ++i) {
    const std::uint32_t a = w[i - 15];
    const std::uint32_t b = w[i - 2];
    w[i] = w[i - 16] + (rotate(a, 7) ^ rotate(a, 18) ^ a >> 3) + w[i - 7] +
           (rotate(b, 17) ^ rotate(b, 19) ^ b >> 10);
  }
  auto [a, b, c, d, e, f, g, h] = state_;
  for (int i = 0; i < 64; ++i) {
    const std::uint32_t choice = (e & f) ^ (~e & g);
    const std::uint32_t majority = (a & b) ^ (a & c) ^ (b & c);
    const std::uint32_t first =
        h + (rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25)) + choice + kRound[i] + w[i];
    const std::uint32_t second = (rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) + majority;
    h = g;
    g = f;
    f = e;
    e = d + first;
    d = c;
    c = b;
    b = a;
    a = first + second;
  }
  const std::array<std::uint32_t, 8> added = {a, b, c, d, e, f, g, h};
  for (std::size_t i = 0; i < 8; ++i) {
    state_[i] += added[i];
  }
}

void Sha256::update(const void* data, std::size_t bytes) {
  const auto* from = static_cast<const unsigned char*>(data);
  total_bytes_ += bytes;
  while (bytes > 0) {
    if (rest_bytes_ == 0 && bytes >= rest_.size()) {
      block(from);
      from += rest_.size();
      bytes -= rest_.size();
      continue;
    }
    const std::size_t taken = std::min(bytes, rest_.size() - rest_bytes_);
    std::memcpy(rest_.data() + rest_bytes_, from, taken);
    rest_bytes_ += taken;
    from += taken;
    bytes -= taken;
    if (rest_bytes_ == rest_.size()) {
      block(rest_.data());
      rest_bytes_ = 0;
    }
  }
}

std::string Sha256::hex() {
  const std::uint64_t bits = 8 * total_bytes_;
  const unsigned char one = 0x80;
  const unsigned char zero = 0;
  update(&one, 1);
  while (rest_bytes_ != 56) {
    update(&zero, 1);
  }
  unsigned char length[8];
  for (int i = 0; i < 8; ++i) {
    length[i] = static_cast<unsigned char>(bits >> (56 - 8 * i));
  }
  update(length, sizeof length);
  std::string text;
  for (const std::uint32_t word : state_) {
    for (int shift = 28; shift >= 0; shift -= 4) {
      text += "0123456789abcdef"[word >> shift & 15u];
    }
  }
  return text;
}

}  // namespace pantile::jit
