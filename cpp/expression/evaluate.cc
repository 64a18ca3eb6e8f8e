#include "expression/evaluate.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "expression/program.h"

namespace pantile::expression {
namespace {

double half_value(std::uint16_t bits) {
  const int exponent = bits >> 10 & 31;
  const int fraction = bits & 1023;
  const double sign = bits >> 15 != 0 ? -1.0 : 1.0;
  if (exponent == 31) {
    return fraction != 0 ? std::nan("") : sign * HUGE_VAL;
  }
  return sign *
         (exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25));
}

double element(CapturedDType dtype, const void* data, std::int64_t at) {
  switch (dtype) {
    case CapturedDType::f32: return static_cast<double>(static_cast<const float*>(data)[at]);
    case CapturedDType::i32: return static_cast<const std::int32_t*>(data)[at];
    case CapturedDType::boolean: return static_cast<const std::uint8_t*>(data)[at] != 0 ? 1.0 : 0.0;
    case CapturedDType::f16: return half_value(static_cast<const std::uint16_t*>(data)[at]);
    case CapturedDType::bf16: {
      const std::uint32_t bits = std::uint32_t{static_cast<const std::uint16_t*>(data)[at]} << 16;
      float value = 0.0f;
      std::memcpy(&value, &bits, sizeof value);
      return static_cast<double>(value);
    }
  }
  return 0.0;
}

// Integers have 32 bits.
double wrapped(double value) {
  return static_cast<std::int32_t>(static_cast<std::uint32_t>(static_cast<std::int64_t>(value)));
}

double input_value(int number, const Place& at) {
  switch (static_cast<Input>(number)) {
    case Input::s: return at.s;
    case Input::b: return at.batch;
    case Input::h: return at.head;
    case Input::i: return at.row;
    case Input::j: return at.key;
  }
  return 0.0;
}

double operation(Op op, double a, double b, double c) {
  switch (op) {
    case Op::add: return a + b;
    case Op::sub: return a - b;
    case Op::mul: return a * b;
    case Op::div: return a / b;
    case Op::floordiv:
      return static_cast<double>(
          floor_div(static_cast<std::int64_t>(a), static_cast<std::int64_t>(b)));
    case Op::mod:
      return static_cast<double>(
          floor_mod(static_cast<std::int64_t>(a), static_cast<std::int64_t>(b)));
    case Op::min: return b < a || b != b ? b : a;
    case Op::max: return b > a || b != b ? b : a;
    case Op::lt: return a < b ? 1.0 : 0.0;
    case Op::le: return a <= b ? 1.0 : 0.0;
    case Op::gt: return a > b ? 1.0 : 0.0;
    case Op::ge: return a >= b ? 1.0 : 0.0;
    case Op::eq: return a == b ? 1.0 : 0.0;
    case Op::ne: return a != b ? 1.0 : 0.0;
    case Op::both: return a != 0.0 && b != 0.0 ? 1.0 : 0.0;
    case Op::either: return a != 0.0 || b != 0.0 ? 1.0 : 0.0;
    case Op::negate: return a == 0.0 ? 1.0 : 0.0;
    case Op::neg: return -a;
    case Op::abs: return std::fabs(a);
    case Op::exp: return std::exp(a);
    case Op::log: return std::log(a);
    case Op::tanh: return std::tanh(a);
    case Op::sqrt: return std::sqrt(a);
    case Op::where: return a != 0.0 ? b : c;
    default: return a;
  }
}

// Of all lanes one.
class Machine {
 public:
  Machine(const Code& code, const CapturedTensor* captured, const Place& place)
      : code_(code), captured_(captured), place_(place) {
    std::fill_n(slots_, code.slots, 0.0);
    for (const Instruction& one : code.once) {
      run(one);
    }
    for (const Instruction& one : code.each) {
      run(one);
    }
  }

  double result(std::size_t number) const { return slots_[code_.results[number]]; }

 private:
  void run(const Instruction& one) {
    double& to = slots_[one.to];
    if (one.op == Op::constant) {
      to = one.value;
    } else if (one.op == Op::input) {
      to = input_value(one.number, place_);
    } else if (one.op == Op::load) {
      std::int64_t indices[kMaxArgs];
      for (int i = 0; i < one.count; ++i) {
        indices[i] = static_cast<std::int64_t>(slots_[one.from[i]]);
      }
      const CapturedTensor& tensor = captured_[one.number];
      to = element(one.dtype, tensor.data, offset_of(tensor, indices, one.count));
    } else {
      const double value =
          operation(one.op, slots_[one.from[0]], slots_[one.from[1]], slots_[one.from[2]]);
      const bool is_arithmetic = one.op == Op::add || one.op == Op::sub || one.op == Op::mul ||
                                 one.op == Op::neg || one.op == Op::abs || one.op == Op::floordiv;
      to = is_arithmetic && one.operands == Kind::integer ? wrapped(value) : value;
    }
  }

  const Code& code_;
  const CapturedTensor* const captured_;
  const Place& place_;
  double slots_[kMaxSlots];  // the first code_.slots are in use
};

}  // namespace

std::int64_t offset_of(const CapturedTensor& tensor, const std::int64_t* indices, int axes) {
  std::int64_t offset = 0;
  for (int axis = 0; axis < axes; ++axis) {
    const std::int64_t last = tensor.size[axis] - 1;
    const std::int64_t index = indices[axis] < 0 ? 0 : indices[axis] > last ? last : indices[axis];
    offset += index * tensor.stride[axis];
  }
  return offset;
}

std::int64_t gradient_offset(const CapturedTensor& tensor, const std::int64_t* indices, int axes) {
  std::int64_t offset = 0;
  for (int axis = 0; axis < axes; ++axis) {
    const std::int64_t last = tensor.size[axis] - 1;
    const std::int64_t index = indices[axis] < 0 ? 0 : indices[axis] > last ? last : indices[axis];
    offset = offset * tensor.size[axis] + index;
  }
  return offset;
}

double evaluate(const Programs& programs, const CapturedTensor* captured, const Place& place) {
  return Machine(programs.value, captured, place).result(0);
}

double evaluate_slope(const Programs& programs, const CapturedTensor* captured,
                      const Place& place) {
  return Machine(programs.value_and_slope, captured, place).result(1);
}

void add_gradients(const Programs& programs, const CapturedTensor* captured, const Place& place,
                   double ds, double* const* gradients) {
  const Machine machine(programs.gradients, captured, place);
  for (const Addend& addend : programs.addends) {
    if (gradients[addend.captured] != nullptr) {
      std::int64_t indices[kMaxArgs];
      for (int axis = 0; axis < addend.axes; ++axis) {
        indices[axis] = static_cast<std::int64_t>(machine.result(addend.index[axis]));
      }
      const std::int64_t at = gradient_offset(captured[addend.captured], indices, addend.axes);
      gradients[addend.captured][at] += ds * machine.result(addend.derivative);
    }
  }
}

}  // namespace pantile::expression
