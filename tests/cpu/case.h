// A CPU attention problem with its data, run through the public plan/run API.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <ostream>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "core/geometry.h"
#include "core/sequence.h"
#include "cpu/convert.h"
#include "pantile/pantile.h"

namespace pantile::testing {

// Memory of one tensor: as many elements as its strides reach, aligned to 64 bytes.
class Buffer {
 public:
  Buffer() = default;
  Buffer(DType dtype, std::int64_t elements)
      : dtype_(dtype),
        bytes_(static_cast<std::size_t>(elements * dtype_bytes(dtype))),
        data_(static_cast<char*>(std::aligned_alloc(64, (bytes_ + 127) / 64 * 64)), std::free) {}

  void* data() { return data_.get(); }
  const void* data() const { return data_.get(); }
  double get(std::int64_t i) const { return cpu::read_element(dtype_, data_.get(), i); }
  void set(std::int64_t i, double x) { cpu::write_element(dtype_, data_.get(), i, x); }
  std::int64_t size() const { return static_cast<std::int64_t>(bytes_) / dtype_bytes(dtype_); }
  void fill(double x) {
    for (std::int64_t i = 0; i < size(); ++i) {
      set(i, x);
    }
  }
  Buffer copy() const {
    Buffer other(dtype_, size());
    std::memcpy(other.data(), data(), bytes_);
    return other;
  }
  bool same_bits(const Buffer& other) const {
    return bytes_ == other.bytes_ &&
           (bytes_ == 0 || std::memcmp(data(), other.data(), bytes_) == 0);
  }

 private:
  DType dtype_ = DType::f32;
  std::size_t bytes_ = 0;
  std::unique_ptr<char, void (*)(void*)> data_{nullptr, std::free};
};

// One of q, k, v, o and their gradients.
struct Tensor {
  Layout layout;
  std::int64_t heads = 0;
  std::int64_t dim = 0;
  bool queries = false;  // rows are queries, not keys
  Buffer buffer;
};

// A problem in numbers; the rest follows.
struct Shape {
  DType dtype = DType::f32;
  int batch = 1;
  int heads_k = 1;
  int group = 1;
  int rows = 1;  // longest
  int keys = 1;  // longest
  int dim = 64;
  int dim_v = 64;
  std::int64_t left = kUnbounded;
  std::int64_t right = kUnbounded;
  bool packed_q = false, packed_k = false;
  bool used_q = false, used_k = false;
  bool strided = false;  // gaps between rows, heads before rows
  bool low = false;      // with the low bits of O; not in f32
  double scale = 0.0;    // 0: 1 / sqrt(dim)
  double spread = 1.0;   // standard deviation of Q and K
};

inline std::ostream& operator<<(std::ostream& out, const Shape& s) {
  return out << dtype_name(s.dtype) << " batch " << s.batch << " heads " << s.heads_k * s.group
             << "/" << s.heads_k << " rows " << s.rows << " keys " << s.keys << " dims " << s.dim
             << "/" << s.dim_v << " window " << s.left << "," << s.right << " packed " << s.packed_q
             << s.packed_k << " used " << s.used_q << s.used_k << " strided " << s.strided
             << " low " << s.low << " scale " << s.scale << " spread " << s.spread;
}

struct Outputs {
  Buffer o, lse;
  Buffer low;  // bytes
  std::int8_t low_at(std::int64_t i) const {
    return static_cast<const std::int8_t*>(low.data())[i];
  }
};
struct Gradients {
  Buffer q, k, v;
};

// How a problem is run.
struct Target {
  Backend backend = Backend::cpu;
  CpuIsa isa = CpuIsa::baseline;
  int threads = 1;
};

// Levels of this machine, lowest first.
std::vector<CpuIsa> usable_isas();

class Case {
 public:
  Case(const Shape& shape, unsigned seed);

  // Outputs start out as NaN, low bits as kUnwritten, so that what is not written shows.
  static constexpr std::int8_t kUnwritten = 0x55;
  Outputs forward(const Target& target);
  // O as accumulated, in f32: the same strides, no low bits.
  Outputs forward_unrounded(const Target& target);
  Gradients backward(const Target& target, const Outputs& outputs);

  // Calls visit(batch, head, row, keys) for every query row that exists, with the keys it sees.
  void for_each_row(const std::function<void(int, int, int, core::Span)>& visit) const;

  // Elements and LSE entries of rows of a sequence.
  std::int64_t at(const Tensor& t, int batch, int head, int row, int d = 0) const {
    return offset(t, batch) + head * t.layout.head + row * t.layout.seq + d;
  }
  std::int64_t lse_at(int batch, int head, int row) const;
  std::int64_t low_at(int batch, int head, int row, int d = 0) const;
  int rows_of(int batch) const { return length(true, batch); }
  int keys_of(int batch) const { return length(false, batch); }
  core::Mask mask(int batch) const {
    return core::make_mask(rows_of(batch), keys_of(batch), shape.left, shape.right);
  }
  core::Heads heads() const { return core::Heads{shape.heads_k * shape.group, shape.heads_k}; }

  // The same case with every element that no query attends to set to `value`.
  void poison(double value);

  // The same problem in f32 with the same values: what the reference is asked for.
  Case widened() const;

  Shape shape;
  ForwardProblem problem;
  Tensor q, k, v, o, grad_o, grad_q, grad_k, grad_v;
  Buffer grad_lse;
  std::vector<std::int32_t> cu_q, cu_k, used_q, used_k;

 private:
  Case() = default;
  int length(bool queries, int batch) const;
  std::int64_t offset(const Tensor& t, int batch) const;
  Tensor tensor(bool queries, int dim) const;
  void lay_out();
  ForwardTensors tensors(const Outputs& outputs);
  Outputs run_forward_problem(const ForwardProblem& asked, const Target& target);
};

// Root of the mean square.
double rms(const std::vector<double>& x);

// Written elements of a tensor, in the order of for_each_row (queries) or of sequences and heads.
std::vector<double> values(const Case& c, const Tensor& t, const Buffer& buffer);
std::vector<double> lse_values(const Case& c, const Buffer& lse);

// Random shapes; the same `seed` gives the same shape.
Shape random_shape(unsigned seed);

}  // namespace pantile::testing
