// Rules for keys that lie in ranges or in pages, and for what is known of keys from outside.
#include <cinttypes>
#include <cstdint>

#include "host/rules.h"
#include "host/validate.h"

namespace pantile::host {
namespace {

constexpr StatusCode kInvalid = StatusCode::invalid_argument;

Status must_not_be(const char* name, const char* because) {
  return Status::error(kInvalid, "%s; it must not be when %s", name, because);
}

}  // namespace

// Where keys lie: in ranges or in pages, in one of both.
Status key_places_rule(const ForwardProblem& p) {
  const bool paged = p.page_size != 0;
  if (!paged && (p.pages != 0 || p.max_pages != 0 || p.table_stride != 0)) {
    return must_not_be("pages, max_pages or table_stride is set", "page_size is 0");
  }
  if (p.has_k_begin && paged) {
    return must_not_be("has_k_begin is true", "page_size is set");
  }
  if (!paged && !p.has_k_begin) {
    return Status();
  }
  if (p.dtype == DType::e4m3) {
    return must_not_be(paged ? "page_size is set" : "has_k_begin is true", "dtype is e4m3");
  }
  if (p.packed_k == paged) {
    return Status::error(kInvalid, "packed_k is %s; it must be %s because %s",
                         paged ? "true" : "false", paged ? "false" : "true",
                         paged ? "keys are in pages" : "has_k_begin is true");
  }
  if (!p.has_seqused_k) {
    return Status::error(kInvalid,
                         "has_seqused_k is false; it must be true because %s: it gives the number "
                         "of keys",
                         paged ? "keys are in pages" : "has_k_begin is true");
  }
  return Status();
}

Status pages_rule(const ForwardProblem& p) {
  if (p.page_size == 0) {
    return Status();
  }
  Status status = first_error({between("page_size", p.page_size, 1, kMaxLength),
                               between("pages", p.pages, 0, kMaxCount),
                               between("max_pages", p.max_pages, 0, kMaxCount)});
  if (!status.ok()) {
    return status;
  }
  if (p.seqlen_k > p.max_pages * p.page_size) {
    return Status::error(kInvalid,
                         "%s is %" PRId64 "; it must be at most max_pages * page_size, %" PRId64
                         " * %" PRId64,
                         seqlen_k_name(p), p.seqlen_k, p.max_pages, p.page_size);
  }
  const std::int64_t least = p.batch > 1 ? p.max_pages : 0;
  return between("table_stride", p.table_stride, least, kMaxReach / (kMaxCount + 1));
}

Status key_statistics_rule(const BackwardProblem& p) {
  const char* const name = p.key_statistics == KeyStatistics::given ? "given" : "written";
  switch (p.key_statistics) {
    case KeyStatistics::own: return Status();
    case KeyStatistics::given:
    case KeyStatistics::written: break;
    default:
      return Status::error(kInvalid,
                           "key_statistics is %d; it must be own (0), given (1) or written (2)",
                           static_cast<int>(p.key_statistics));
  }
  if (!p.deterministic) {
    return Status::error(kInvalid,
                         "key_statistics is %s; it must be own unless deterministic is "
                         "true",
                         name);
  }
  if (p.key_statistics == KeyStatistics::written && p.forward.has_k_begin) {
    return Status::error(kInvalid,
                         "key_statistics is written, and has_k_begin is true; it must be "
                         "false");
  }
  if (p.key_statistics == KeyStatistics::written &&
      (p.forward.window_left != kUnbounded || p.forward.window_right != kUnbounded)) {
    return Status::error(kInvalid,
                         "key_statistics is written, and the window is %lld, %lld; it must be "
                         "unbounded, for statistics of all keys",
                         static_cast<long long>(p.forward.window_left),
                         static_cast<long long>(p.forward.window_right));
  }
  return Status();
}

}  // namespace pantile::host
