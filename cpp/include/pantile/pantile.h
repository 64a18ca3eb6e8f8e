// Everything: exact attention by streaming tiles. See attention.h for the calls.
#pragma once

#include "pantile/attention.h"
#include "pantile/device.h"
#include "pantile/dtype.h"
#include "pantile/expression.h"
#include "pantile/jit.h"
#include "pantile/kv.h"
#include "pantile/plan.h"
#include "pantile/problem.h"
#include "pantile/quantize.h"
#include "pantile/registry.h"
#include "pantile/status.h"
#include "pantile/tuning.h"
#include "pantile/variant.h"
#include "pantile/version.h"
