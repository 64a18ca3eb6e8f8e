// How the FP8 forwards make weights of scores. Plain C++17: plans read it too.
#pragma once

#include "pantile/problem.h"

namespace pantile::attn {

// Of eight groups of P, those that take their e4m3 codes straight from the logarithm.
constexpr unsigned fp8_code_groups(Fp8Exp exp) {
  return exp == Fp8Exp::code ? 0xffu : exp == Fp8Exp::mixed ? 0x66u : 0u;
}

// Neither the fastest nor the most accurate: to compare with.
constexpr bool is_trial(Fp8Exp exp) {
  return exp == Fp8Exp::mixed;
}

}  // namespace pantile::attn
