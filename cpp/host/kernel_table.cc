#include "host/kernel_table.h"

#include "ampere/plan.h"
#include "build_info.h"
#include "core/scaling.h"
#include "cpu/backend.h"
#include "hopper/plan.h"
#include "host/features.h"

namespace pantile {

#if PANTILE_HAS_CUDA
// The entry points of the generated instances (cuda/instance.cu.in).
namespace kernels {
#define PANTILE_TYPES_forward const ForwardPlan&, const ForwardTensors&
#define PANTILE_TYPES_backward const BackwardPlan&, const BackwardTensors&
#define PANTILE_TYPES_quantize const QuantizePlan&, const QuantizeTensors&
#define PANTILE_TYPES_decode const DecodePlan&, const KvTensors&
#define PANTILE_TYPES_append const AppendPlan&, const KvTensors&
#define PANTILE_KERNEL_ROW(name, backend, pass, dtype, head_dim, head_dim_v, mask, features) \
  Status name(PANTILE_TYPES_##pass, void* workspace, void* stream);
#include "kernel_rows.inc"
#undef PANTILE_KERNEL_ROW
}  // namespace kernels
#define PANTILE_ENTRY(name) kernels::name
#define PANTILE_SCHEDULE(backend) backend::schedule_decode
#define PANTILE_SPLITS(backend) backend::prepare_splits, backend::merge_splits
#else
#define PANTILE_ENTRY(name) nullptr
#define PANTILE_SCHEDULE(backend) nullptr
#define PANTILE_SPLITS(backend) nullptr, nullptr
#endif

namespace host {
namespace {

// What a row of a pass has behind its entry point.
#define PANTILE_REST_forward(backend) PANTILE_SPLITS(backend)
#define PANTILE_REST_backward(backend)
#define PANTILE_REST_quantize(backend)
#define PANTILE_REST_decode(backend) PANTILE_SCHEDULE(backend)
#define PANTILE_REST_append(backend)
#define PANTILE_KERNEL_ROW(name, backend, pass, dtype, head_dim, head_dim_v, mask, features) \
  {{#name, Backend::backend, Pass::pass, DType::dtype, head_dim, head_dim_v, MaskKind::mask, \
    PANTILE_HAS_CUDA != 0, feature_sets::features},                                          \
   backend::accept_##pass,                                                                   \
   backend::configure_##pass,                                                                \
   PANTILE_ENTRY(name),                                                                      \
   PANTILE_REST_##pass(backend)},

constexpr KernelInfo cpu_info(const char* name, Backend backend, Pass pass, DType dtype) {
  const bool f32 = dtype == DType::f32;
  return {name,
          backend,
          pass,
          dtype,
          kMaxHeadDim,
          kMaxHeadDim,
          MaskKind::any,
          true,
          feature_sets::with_ranges(feature_sets::with_masks(
              pass == Pass::forward
                  ? feature_sets::with_score(
                        feature_sets::with_variants(f32 ? feature_sets::forward_f32
                                                        : feature_sets::forward_16bit))
                        .with(Feature::paged)
                  : feature_sets::with_score_gradients(feature_sets::with_variant_gradients(
                        f32 ? feature_sets::backward_f32_cpu : feature_sets::backward_16bit))))};
}

constexpr ForwardRow cpu_forward(const char* name, DType dtype) {
  return {cpu_info(name, Backend::cpu, Pass::forward, dtype),
          cpu::accept_forward,
          cpu::configure_forward,
          cpu::run_forward,
          cpu::prepare_splits,
          cpu::merge_splits};
}

constexpr ForwardRow reference_forward(const char* name, DType dtype) {
  return {cpu_info(name, Backend::reference, Pass::forward, dtype),
          cpu::accept_forward,
          cpu::configure_reference_forward,
          cpu::reference_forward,
          cpu::prepare_splits,
          cpu::merge_splits};
}

constexpr KernelInfo fp8_info(const char* name, Backend backend, Pass pass, DType dtype) {
  return {name,
          backend,
          pass,
          dtype,
          core::kMaxFp8Dim,
          core::kMaxFp8Dim,
          MaskKind::any,
          true,
          pass == Pass::forward    ? feature_sets::forward_fp8
          : pass == Pass::backward ? feature_sets::backward_fp8
          : dtype == DType::e4m3   ? feature_sets::quantize_fp8
                                   : feature_sets::quantize};
}

constexpr ForwardRow cpu_forward_fp8(const char* name, DType dtype) {
  return {fp8_info(name, Backend::cpu, Pass::forward, dtype),
          cpu::accept_forward,
          cpu::configure_forward_fp8,
          cpu::run_forward_fp8,
          cpu::prepare_splits,
          cpu::merge_splits};
}

constexpr BackwardRow cpu_backward_fp8(const char* name, DType dtype) {
  return {fp8_info(name, Backend::cpu, Pass::backward, dtype), cpu::accept_backward,
          cpu::configure_backward_fp8, cpu::run_backward_fp8};
}

constexpr ForwardRow reference_forward_fp8(const char* name, DType dtype) {
  return {fp8_info(name, Backend::reference, Pass::forward, dtype),
          cpu::accept_forward,
          cpu::configure_reference_forward,
          cpu::reference_forward_fp8,
          cpu::prepare_splits,
          cpu::merge_splits};
}

constexpr QuantizeRow cpu_quantize(const char* name, DType dtype) {
  return {fp8_info(name, Backend::cpu, Pass::quantize, dtype), cpu::accept_quantize,
          cpu::configure_quantize, cpu::run_quantize};
}

// The same: every bit of the operands is specified, so that there is nothing to be more exact in.
constexpr QuantizeRow reference_quantize(const char* name, DType dtype) {
  return {fp8_info(name, Backend::reference, Pass::quantize, dtype), cpu::accept_quantize,
          cpu::configure_quantize, cpu::run_quantize};
}

constexpr KernelInfo kv_info(const char* name, Backend backend, Pass pass, DType dtype) {
  return {name,
          backend,
          pass,
          dtype,
          kMaxKvHeadDim,
          kMaxHeadDim,
          MaskKind::any,
          true,
          pass == Pass::decode ? feature_sets::decode : feature_sets::append};
}

constexpr DecodeRow cpu_decode(const char* name, DType dtype) {
  return {kv_info(name, Backend::cpu, Pass::decode, dtype), cpu::accept_decode,
          cpu::configure_decode, cpu::run_decode, cpu::schedule_decode};
}

constexpr DecodeRow reference_decode(const char* name, DType dtype) {
  return {kv_info(name, Backend::reference, Pass::decode, dtype), cpu::accept_decode,
          cpu::configure_reference_decode, cpu::reference_decode, cpu::schedule_nothing};
}

// One for both: every bit that is appended is specified.
constexpr AppendRow cpu_append(const char* name, Backend backend, DType dtype) {
  return {kv_info(name, backend, Pass::append, dtype), cpu::accept_append, cpu::configure_append,
          cpu::run_append};
}

constexpr BackwardRow cpu_backward(const char* name, DType dtype) {
  return {cpu_info(name, Backend::cpu, Pass::backward, dtype), cpu::accept_backward,
          cpu::configure_backward, cpu::run_backward};
}

constexpr BackwardRow reference_backward(const char* name, DType dtype) {
  return {cpu_info(name, Backend::reference, Pass::backward, dtype), cpu::accept_backward,
          cpu::configure_reference_backward, cpu::reference_backward};
}

constexpr ForwardRow kForwardRows[] = {
#include "kernel_rows_forward.inc"
    cpu_forward("cpu_forward_f32", DType::f32),
    cpu_forward("cpu_forward_f16", DType::f16),
    cpu_forward("cpu_forward_bf16", DType::bf16),
    cpu_forward_fp8("cpu_forward_e4m3", DType::e4m3),
    reference_forward("reference_forward_f32", DType::f32),
    reference_forward("reference_forward_f16", DType::f16),
    reference_forward("reference_forward_bf16", DType::bf16),
    reference_forward_fp8("reference_forward_e4m3", DType::e4m3),
};

constexpr BackwardRow kBackwardRows[] = {
#include "kernel_rows_backward.inc"
    cpu_backward("cpu_backward_f32", DType::f32),
    cpu_backward("cpu_backward_f16", DType::f16),
    cpu_backward("cpu_backward_bf16", DType::bf16),
    cpu_backward_fp8("cpu_backward_e4m3", DType::e4m3),
    reference_backward("reference_backward_f32", DType::f32),
    reference_backward("reference_backward_f16", DType::f16),
    reference_backward("reference_backward_bf16", DType::bf16),
};

constexpr QuantizeRow kQuantizeRows[] = {
#include "kernel_rows_quantize.inc"
    cpu_quantize("cpu_quantize_f32", DType::f32),
    cpu_quantize("cpu_quantize_f16", DType::f16),
    cpu_quantize("cpu_quantize_bf16", DType::bf16),
    cpu_quantize("cpu_quantize_e4m3", DType::e4m3),
    reference_quantize("reference_quantize_f32", DType::f32),
    reference_quantize("reference_quantize_f16", DType::f16),
    reference_quantize("reference_quantize_bf16", DType::bf16),
    reference_quantize("reference_quantize_e4m3", DType::e4m3),
};

constexpr DecodeRow kDecodeRows[] = {
#include "kernel_rows_decode.inc"
    cpu_decode("cpu_decode_f32", DType::f32),
    cpu_decode("cpu_decode_f16", DType::f16),
    cpu_decode("cpu_decode_bf16", DType::bf16),
    reference_decode("reference_decode_f32", DType::f32),
    reference_decode("reference_decode_f16", DType::f16),
    reference_decode("reference_decode_bf16", DType::bf16),
};

constexpr AppendRow kAppendRows[] = {
#include "kernel_rows_append.inc"
    cpu_append("cpu_append_f32", Backend::cpu, DType::f32),
    cpu_append("cpu_append_f16", Backend::cpu, DType::f16),
    cpu_append("cpu_append_bf16", Backend::cpu, DType::bf16),
    cpu_append("reference_append_f32", Backend::reference, DType::f32),
    cpu_append("reference_append_f16", Backend::reference, DType::f16),
    cpu_append("reference_append_bf16", Backend::reference, DType::bf16),
};

constexpr int kForwardCount = static_cast<int>(sizeof kForwardRows / sizeof kForwardRows[0]);
constexpr int kBackwardCount = static_cast<int>(sizeof kBackwardRows / sizeof kBackwardRows[0]);
constexpr int kQuantizeCount = static_cast<int>(sizeof kQuantizeRows / sizeof kQuantizeRows[0]);
constexpr int kDecodeCount = static_cast<int>(sizeof kDecodeRows / sizeof kDecodeRows[0]);
constexpr int kAppendCount = static_cast<int>(sizeof kAppendRows / sizeof kAppendRows[0]);

}  // namespace

RowList<ForwardRow> forward_rows() {
  return {kForwardRows, kForwardCount};
}
RowList<BackwardRow> backward_rows() {
  return {kBackwardRows, kBackwardCount};
}
RowList<QuantizeRow> quantize_rows() {
  return {kQuantizeRows, kQuantizeCount};
}
RowList<DecodeRow> decode_rows() {
  return {kDecodeRows, kDecodeCount};
}
RowList<AppendRow> append_rows() {
  return {kAppendRows, kAppendCount};
}

}  // namespace host

int kernel_count() {
  return host::kForwardCount + host::kBackwardCount + host::kQuantizeCount + host::kDecodeCount +
         host::kAppendCount;
}

namespace {

// The row at `index` of the table's lists, one after the other.
template <class Row, class... Rows>
const KernelInfo& info_at(int index, host::RowList<Row> list, Rows... others) {
  if constexpr (sizeof...(others) > 0) {
    return index < list.count ? list.rows[index].info : info_at(index - list.count, others...);
  } else {
    return list.rows[index].info;
  }
}

}  // namespace

const KernelInfo& kernel_info(int index) {
  return info_at(index, host::forward_rows(), host::backward_rows(), host::quantize_rows(),
                 host::decode_rows(), host::append_rows());
}

const char* backend_name(Backend backend) {
  switch (backend) {
    case Backend::automatic: return "auto";
    case Backend::hopper: return "hopper";
    case Backend::ampere: return "ampere";
    case Backend::cpu: return "cpu";
    case Backend::reference: return "reference";
  }
  return "?";
}

const char* pass_name(Pass pass) {
  switch (pass) {
    case Pass::forward: return "forward";
    case Pass::backward: return "backward";
    case Pass::quantize: return "quantize";
    case Pass::decode: return "decode";
    case Pass::append: return "append";
  }
  return "?";
}

const char* mask_kind_name(MaskKind mask) {
  switch (mask) {
    case MaskKind::full: return "full";
    case MaskKind::causal: return "causal";
    case MaskKind::window: return "window";
    case MaskKind::any: return "any";
  }
  return "?";
}

}  // namespace pantile
