// Lengths of packed sequences, and check_sequences: the contents of cu_seqlens and seqused, which
// validate.cc must not read because they may live on a GPU.
#include <cinttypes>
#include <cstdint>

#include "host/validate.h"
#include "pantile/attention.h"

namespace pantile {
namespace {

constexpr StatusCode kInvalid = StatusCode::invalid_argument;

// One side of the problem, with the names its messages use.
struct Side {
  const char* cu_name;
  const char* used_name;
  const char* total_name;
  const char* length_name;
  const std::int32_t* cu_seqlens;
  const std::int32_t* seqused;
  bool packed, has_seqused;
  std::int64_t batch, length, total;
};

Status check_cu_seqlens(const Side& side) {
  if (!side.packed) {
    return Status();
  }
  if (side.cu_seqlens == nullptr) {
    return Status::error(kInvalid, "%s is null; it must hold batch + 1 offsets", side.cu_name);
  }
  const std::int32_t* cu = side.cu_seqlens;
  if (cu[0] != 0) {
    return Status::error(kInvalid, "%s[0] is %d; it must be 0", side.cu_name, cu[0]);
  }
  for (std::int64_t b = 0; b < side.batch; ++b) {
    if (cu[b + 1] < cu[b]) {
      return Status::error(kInvalid,
                           "%s[%" PRId64 "] is %d; it must be at least %s[%" PRId64 "], %d",
                           side.cu_name, b + 1, cu[b + 1], side.cu_name, b, cu[b]);
    }
    const std::int64_t rows = std::int64_t{cu[b + 1]} - cu[b];
    if (rows > side.length) {
      return Status::error(kInvalid,
                           "%s makes sequence %" PRId64 " %" PRId64
                           " long; it must be at most %s, %" PRId64,
                           side.cu_name, b, rows, side.length_name, side.length);
    }
  }
  if (cu[side.batch] != side.total) {
    return Status::error(kInvalid, "%s[%" PRId64 "] is %d; the last offset must be %s, %" PRId64,
                         side.cu_name, side.batch, cu[side.batch], side.total_name, side.total);
  }
  return Status();
}

Status check_seqused(const Side& side) {
  if (!side.has_seqused) {
    return Status();
  }
  if (side.seqused == nullptr) {
    return Status::error(kInvalid, "%s is null; it must hold batch lengths", side.used_name);
  }
  for (std::int64_t b = 0; b < side.batch; ++b) {
    const std::int64_t rows =
        side.packed ? std::int64_t{side.cu_seqlens[b + 1]} - side.cu_seqlens[b] : side.length;
    if (side.seqused[b] < 0 || side.seqused[b] > rows) {
      return Status::error(kInvalid, "%s[%" PRId64 "] is %d; it must be from 0 to %" PRId64,
                           side.used_name, b, side.seqused[b], rows);
    }
  }
  return Status();
}

// Key ranges and pages: within the tensors.
Status check_key_places(const ForwardProblem& p, const ForwardTensors& t) {
  for (std::int64_t b = 0; b < p.batch && p.has_k_begin; ++b) {
    const std::int64_t end = std::int64_t{t.k_begin[b]} + t.seqused_k[b];
    if (t.k_begin[b] < 0 || end > p.total_k) {
      return Status::error(kInvalid,
                           "k_begin[%" PRId64
                           "] is %d with %d keys; the range must lie within the "
                           "%" PRId64 " rows of k",
                           b, t.k_begin[b], t.seqused_k[b], p.total_k);
    }
  }
  for (std::int64_t b = 0; b < p.batch && p.page_size > 0; ++b) {
    const std::int64_t used = (t.seqused_k[b] + p.page_size - 1) / p.page_size;
    for (std::int64_t i = 0; i < used; ++i) {
      const std::int32_t page = t.block_table[b * p.table_stride + i];
      if (page < 0 || page >= p.pages) {
        return Status::error(kInvalid,
                             "block_table[%" PRId64 "][%" PRId64
                             "] is %d; it must be from 0 to "
                             "%" PRId64,
                             b, i, page, p.pages - 1);
      }
    }
  }
  return Status();
}

Status check_mask_shift(const ForwardProblem& p, const ForwardTensors& t) {
  constexpr std::int32_t kMost = (1 << 29) - 1;  // core/geometry.h
  for (std::int64_t b = 0; b < p.batch && p.has_mask_shift; ++b) {
    if (t.mask_shift[b] < -kMost || t.mask_shift[b] > kMost) {
      return Status::error(kInvalid, "mask_shift[%" PRId64 "] is %d; it must be from %d to %d", b,
                           t.mask_shift[b], -kMost, kMost);
    }
  }
  return Status();
}

Status check_side(const Side& side) {
  Status status = check_cu_seqlens(side);
  return status.ok() ? check_seqused(side) : status;
}

}  // namespace

namespace host {

const char* seqlen_q_name(const ForwardProblem& p) {
  return p.packed_q ? "max_seqlen_q (seqlen_q)" : "seqlen_q";
}

const char* seqlen_k_name(const ForwardProblem& p) {
  return p.packed_k ? "max_seqlen_k (seqlen_k)" : "seqlen_k";
}

Status packed_length_rule(const char* name, std::int64_t length, std::int64_t batch,
                          const char* total_name, std::int64_t total) {
  if (total <= batch * length) {
    return Status();
  }
  return Status::error(
      kInvalid,
      "%s is %" PRId64 "; with batch %" PRId64 " and %s %" PRId64 " it must be at least %" PRId64,
      name, length, batch, total_name, total, batch > 0 ? (total + batch - 1) / batch : total);
}

}  // namespace host

Status check_sequences(const ForwardProblem& p, const ForwardTensors& t) {
  Status status = host::validate(p);
  if (status.ok()) {
    status =
        check_side({"cu_seqlens_q", "seqused_q", "total_q", host::seqlen_q_name(p), t.cu_seqlens_q,
                    t.seqused_q, p.packed_q, p.has_seqused_q, p.batch, p.seqlen_q, p.total_q});
  }
  if (status.ok()) {
    status = check_side({"cu_seqlens_k", "seqused_k", "total_k", host::seqlen_k_name(p),
                         t.cu_seqlens_k, t.seqused_k, p.packed_k && !p.has_k_begin, p.has_seqused_k,
                         p.batch, p.seqlen_k, p.total_k});
  }
  if (status.ok()) {
    status = check_key_places(p, t);
  }
  return status.ok() ? check_mask_shift(p, t) : status;
}

}  // namespace pantile
