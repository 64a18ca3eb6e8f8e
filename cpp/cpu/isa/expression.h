// Runs the program of an expression (expression/instruction.h) on rows of a tile: a value of every
// lane of a row in each slot, an operation after the other.
#pragma once

#include "cpu/isa/problem.h"
#include "expression/instruction.h"

namespace pantile::cpu::PANTILE_ISA {
namespace {

using expression::Instruction;
using expression::Kind;
using expression::Op;
using expression::Program;

// Lanes of a slot: a row of a tile of either pass.
constexpr int kSlotLanes = kForwardRows > kBackwardKeys ? kForwardRows : kBackwardKeys;
static_assert(kSlotLanes % kLanes == 0);

// tanh(x) and its derivative; relative error of tanh below 3e-7.
struct Tanh {
  Floats value, slope;
};

// Near 0 a polynomial in x^2, a minimax fit of the relative error (2e-8 for |x| < 0.7); otherwise
// 1 - 2 / (e^(2|x|) + 1), whose difference is accurate there. NaN stays NaN.
PANTILE_INLINE Tanh tanh(Floats x) {
  const Words sign = bits(x) & 0x80000000u;
  const Floats size = from_bits(bits(x) & 0x7fffffffu);
  const Floats twice = select(size > splat(20.0f), splat(40.0f), size + size);
  const Floats rest = splat(2.0f) / (exp(twice) + splat(1.0f));  // 1 - tanh(|x|)
  const Floats z = x * x;
  Floats p = splat(-5.13865845e-3f);
  p = p * z + splat(2.00919658e-2f);
  p = p * z + splat(-5.35588600e-2f);
  p = p * z + splat(1.33291110e-1f);
  p = p * z + splat(-3.33331913e-1f);
  const Floats near = size + size * z * p;
  const Floats value = select(size < splat(0.7f), near, splat(1.0f) - rest);
  return Tanh{from_bits(bits(value) | sign), rest * (splat(2.0f) - rest)};
}

PANTILE_INLINE Floats to_floats(Ints x) {
  return __builtin_convertvector(x, Floats);
}

// The pairs of one row of a tile, `count` of them along the lanes: S^T has queries there, S keys.
// Numbers past the sequence are those of its last query or key.
struct PairRow {
  int first_row, first_key;
  int step_row, step_key;  // 1 along the lanes, and 0
  int last_row, last_key;
  int vectors;
};

class Machine {
 public:
  // Values that depend on the sequence and the head only are computed here.
  Machine(const Program& program, const CapturedTensor* captured, int batch, int head)
      : program_(program), captured_(captured), batch_(batch), head_(head) {
    const PairRow all{0, 0, 0, 0, 0, 0, kSlotLanes / kLanes};
    for (int i = 0; i < program.once_count; ++i) {
      run(program.once[i], nullptr, all);
    }
  }

  // `scores` are those of the row.
  void run_row(const float* scores, const PairRow& at) {
    for (int i = 0; i < program_.each_count; ++i) {
      run(program_.each[i], scores, at);
    }
  }

  // Of result `number`, kLanes values from lane `lane` on.
  PANTILE_INLINE Floats real(int number, int lane) const {
    return load(floats(program_.results[number]) + lane);
  }
  PANTILE_INLINE Ints whole(int number, int lane) const {
    return reinterpret_cast<Ints>(load(floats(program_.results[number]) + lane));
  }
  PANTILE_INLINE float number(int number, int lane) const {
    return floats(program_.results[number])[lane];
  }
  PANTILE_INLINE std::int32_t integer(int number, int lane) const {
    std::int32_t value;
    __builtin_memcpy(&value, floats(program_.results[number]) + lane, sizeof value);
    return value;
  }

 private:
  PANTILE_INLINE float* floats(int slot) { return slots_ + slot * kSlotLanes; }
  PANTILE_INLINE const float* floats(int slot) const { return slots_ + slot * kSlotLanes; }

  // to[v] = f(operands[v]) of every vector of the row.
  template <class F>
  PANTILE_INLINE void each(const Instruction& one, int vectors, const F& f) {
    const float* a = floats(one.from[0]);
    const float* b = floats(one.from[1]);
    const float* c = floats(one.from[2]);
    float* to = floats(one.to);
    for (int at = 0; at < vectors * kLanes; at += kLanes) {
      store(to + at, f(load(a + at), load(b + at), load(c + at)));
    }
  }
  template <class F>
  PANTILE_INLINE void each_lane(const Instruction& one, int vectors, const F& f) {
    const float* a = floats(one.from[0]);
    const float* b = floats(one.from[1]);
    float* to = floats(one.to);
    for (int at = 0; at < vectors * kLanes; ++at) {
      to[at] = f(a[at], b[at]);
    }
  }

  static PANTILE_INLINE Ints ints(Floats x) { return reinterpret_cast<Ints>(x); }
  static PANTILE_INLINE Floats as_floats(Ints x) { return reinterpret_cast<Floats>(x); }
  static PANTILE_INLINE std::int32_t int_of(float x) {
    std::int32_t value;
    __builtin_memcpy(&value, &x, sizeof value);
    return value;
  }
  static PANTILE_INLINE float float_of(std::int64_t x) {
    const auto value = static_cast<std::int32_t>(x);
    float bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
  }

  void run(const Instruction& one, const float* scores, const PairRow& at) {
    switch (one.op) {
      case Op::constant: return constant(one, at.vectors);
      case Op::input: return input(one, scores, at);
      case Op::load: return gather(one, at.vectors);
      case Op::both:
        return each(one, at.vectors,
                    [](Floats a, Floats b, Floats) { return as_floats(ints(a) & ints(b)); });
      case Op::either:
        return each(one, at.vectors,
                    [](Floats a, Floats b, Floats) { return as_floats(ints(a) | ints(b)); });
      case Op::negate:
        return each(one, at.vectors, [](Floats a, Floats, Floats) { return as_floats(~ints(a)); });
      case Op::real:
        return each(one, at.vectors, [](Floats a, Floats, Floats) { return to_floats(ints(a)); });
      case Op::where:
        return each(one, at.vectors,
                    [](Floats a, Floats b, Floats c) { return select(ints(a), b, c); });
      default:
        return one.operands == Kind::integer ? of_integers(one, at.vectors)
                                             : of_reals(one, at.vectors);
    }
  }

  void constant(const Instruction& one, int vectors) {
    const auto whole = static_cast<std::int32_t>(one.operands == Kind::real        ? 0
                                                 : one.operands == Kind::condition ? -one.value
                                                                                   : one.value);
    const Floats value = one.operands == Kind::real ? splat(static_cast<float>(one.value))
                                                    : as_floats(Ints{} + whole);
    each(one, vectors, [&](Floats, Floats, Floats) { return value; });
  }

  void input(const Instruction& one, const float* scores, const PairRow& at) {
    using expression::Input;
    const auto which = static_cast<Input>(one.number);
    float* to = floats(one.to);
    for (int lane = 0; lane < at.vectors * kLanes; lane += kLanes) {
      if (which == Input::s) {
        store(to + lane, load(scores + lane));
        continue;
      }
      const bool is_row = which == Input::i;
      const int first = which == Input::b   ? batch_
                        : which == Input::h ? head_
                        : is_row            ? at.first_row
                                            : at.first_key;
      const int step = which == Input::b || which == Input::h ? 0
                       : is_row                               ? at.step_row
                                                              : at.step_key;
      const Ints value = (lane_numbers() + lane) * step + first;
      const Ints last = Ints{} + (is_row ? at.last_row : at.last_key);
      const bool bounded = step != 0;
      store(to + lane, as_floats(bounded ? (value > last ? last : value) : value));
    }
  }

  // Indices are moved into the tensor.
  void gather(const Instruction& one, int vectors) {
    const CapturedTensor& tensor = captured_[one.number];
    float* to = floats(one.to);
    for (int lane = 0; lane < vectors * kLanes; ++lane) {
      std::int64_t offset = 0;
      for (int axis = 0; axis < one.count; ++axis) {
        const std::int64_t index = int_of(floats(one.from[axis])[lane]);
        offset += core::clamp<std::int64_t>(index, 0, tensor.size[axis] - 1) * tensor.stride[axis];
      }
      to[lane] = element(one.dtype, tensor.data, offset);
    }
  }

  static PANTILE_INLINE float element(CapturedDType dtype, const void* data, std::int64_t at) {
    switch (dtype) {
      case CapturedDType::f32: return static_cast<const float*>(data)[at];
      case CapturedDType::f16: return half(static_cast<const std::uint16_t*>(data)[at]);
      case CapturedDType::bf16:
        return float_of(std::int64_t{static_cast<const std::uint16_t*>(data)[at]} << 16);
      case CapturedDType::i32: return float_of(static_cast<const std::int32_t*>(data)[at]);
      case CapturedDType::boolean:
        return float_of(static_cast<const std::uint8_t*>(data)[at] != 0 ? -1 : 0);
    }
    return 0.0f;
  }

  static PANTILE_INLINE float half(std::uint16_t bits) {
    std::uint16_t row[kLanes] = {bits};
    return F16::read(row)[0];
  }

  void of_integers(const Instruction& one, int vectors) {
    const auto both = [&](auto f) {
      each(one, vectors, [&](Floats a, Floats b, Floats) {
        return as_floats(
            reinterpret_cast<Ints>(f(reinterpret_cast<Words>(a), reinterpret_cast<Words>(b))));
      });
    };
    const auto compare = [&](auto f) {
      each(one, vectors,
           [&](Floats a, Floats b, Floats) { return as_floats(f(ints(a), ints(b))); });
    };
    switch (one.op) {
      case Op::add: return both([](Words a, Words b) { return a + b; });
      case Op::sub: return both([](Words a, Words b) { return a - b; });
      case Op::mul: return both([](Words a, Words b) { return a * b; });
      case Op::neg: return both([](Words a, Words) { return 0u - a; });
      case Op::abs: return compare([](Ints a, Ints) { return a < 0 ? 0 - a : a; });
      case Op::min: return compare([](Ints a, Ints b) { return b < a ? b : a; });
      case Op::max: return compare([](Ints a, Ints b) { return b > a ? b : a; });
      case Op::lt: return compare([](Ints a, Ints b) { return a < b; });
      case Op::le: return compare([](Ints a, Ints b) { return a <= b; });
      case Op::gt: return compare([](Ints a, Ints b) { return a > b; });
      case Op::ge: return compare([](Ints a, Ints b) { return a >= b; });
      case Op::eq: return compare([](Ints a, Ints b) { return a == b; });
      case Op::ne: return compare([](Ints a, Ints b) { return a != b; });
      case Op::floordiv:
        return each_lane(one, vectors, [](float a, float b) {
          return float_of(expression::floor_div(int_of(a), int_of(b)));
        });
      default:  // mod
        return each_lane(one, vectors, [](float a, float b) {
          return float_of(expression::floor_mod(int_of(a), int_of(b)));
        });
    }
  }

  void of_reals(const Instruction& one, int vectors) {
    const auto both = [&](auto f) {
      each(one, vectors, [&](Floats a, Floats b, Floats) { return f(a, b); });
    };
    const auto compare = [&](auto f) {
      each(one, vectors, [&](Floats a, Floats b, Floats) { return as_floats(f(a, b)); });
    };
    switch (one.op) {
      case Op::add: return both([](Floats a, Floats b) { return a + b; });
      case Op::sub: return both([](Floats a, Floats b) { return a - b; });
      case Op::mul: return both([](Floats a, Floats b) { return a * b; });
      case Op::div: return both([](Floats a, Floats b) { return a / b; });
      case Op::neg: return both([](Floats a, Floats) { return from_bits(bits(a) ^ 0x80000000u); });
      case Op::abs: return both([](Floats a, Floats) { return from_bits(bits(a) & 0x7fffffffu); });
      case Op::min:  // NaN of either operand comes through
        return both([](Floats a, Floats b) { return select((b < a) | (b != b), b, a); });
      case Op::max:
        return both([](Floats a, Floats b) { return select((b > a) | (b != b), b, a); });
      case Op::lt: return compare([](Floats a, Floats b) { return a < b; });
      case Op::le: return compare([](Floats a, Floats b) { return a <= b; });
      case Op::gt: return compare([](Floats a, Floats b) { return a > b; });
      case Op::ge: return compare([](Floats a, Floats b) { return a >= b; });
      case Op::eq: return compare([](Floats a, Floats b) { return a == b; });
      case Op::ne: return compare([](Floats a, Floats b) { return a != b; });
      case Op::exp: return both([](Floats a, Floats) { return unbounded_exp(a); });
      case Op::tanh: return both([](Floats a, Floats) { return tanh(a).value; });
      case Op::log:
        return each_lane(one, vectors, [](float a, float) { return __builtin_logf(a); });
      default:  // sqrt
        return each_lane(one, vectors, [](float a, float) { return __builtin_sqrtf(a); });
    }
  }

  // exp() is for arguments up to 88.
  static PANTILE_INLINE Floats unbounded_exp(Floats x) {
    const Ints large = x > splat(88.0f);
    const Floats half = exp(select(large, x * splat(0.5f), x));
    return select(large, select(x > splat(89.0f), splat(__builtin_huge_valf()), half * half), half);
  }

  const Program& program_;
  const CapturedTensor* const captured_;
  const int batch_, head_;
  alignas(64) float slots_[expression::kMaxSlots * kSlotLanes];
};

}  // namespace
}  // namespace pantile::cpu::PANTILE_ISA
