#include "textbook.h"

#include <algorithm>
#include <vector>

namespace pantile::testing {
namespace {

// Row-major, in f32; set() rounds to the type that the textbook works in.
class Matrix {
 public:
  Matrix(DType dtype, int rows, int columns)
      : rows_(rows), columns_(columns), cell_(dtype, 1), data_(size(rows, columns), 0.0f) {}

  int rows() const { return rows_; }
  int columns() const { return columns_; }
  float get(int row, int column) const { return data_[index(row, column)]; }
  void set(int row, int column, float x) { data_[index(row, column)] = rounded(x); }
  float rounded(float x) const {
    cell_.set(0, static_cast<double>(x));
    return static_cast<float>(cell_.get(0));
  }

 private:
  static std::size_t size(int rows, int columns) {
    return static_cast<std::size_t>(rows) * static_cast<std::size_t>(columns);
  }
  std::size_t index(int row, int column) const {
    return static_cast<std::size_t>(row) * static_cast<std::size_t>(columns_) +
           static_cast<std::size_t>(column);
  }
  int rows_, columns_;
  mutable Buffer cell_;
  std::vector<float> data_;
};

Matrix head_matrix(const Case& c, const Tensor& t, int batch, int head, int rows) {
  Matrix m(c.shape.dtype, rows, static_cast<int>(t.dim));
  for (int row = 0; row < rows; ++row) {
    for (int d = 0; d < m.columns(); ++d) {
      m.set(row, d, static_cast<float>(t.buffer.get(c.at(t, batch, head, row, d))));
    }
  }
  return m;
}

// a b^T
float row_product(const Matrix& a, int row_a, const Matrix& b, int row_b) {
  float sum = 0.0f;
  for (int d = 0; d < a.columns(); ++d) {
    sum += a.get(row_a, d) * b.get(row_b, d);
  }
  return sum;
}

// The squared errors of one tensor.
struct Squares {
  double sum = 0.0;
  double count = 0.0;
  void add(float x, double truth) {
    const double error = static_cast<double>(x) - truth;
    sum += error * error;
    count += 1.0;
  }
  double rms() const { return count == 0.0 ? 0.0 : std::sqrt(sum / count); }
};

struct AllSquares {
  Squares o, lse, q, k, v;
};

// One head of one sequence.
struct Head {
  const Case& c;
  int batch, head;
  core::Mask mask;
  Matrix q, k, v, grad_o;
  Matrix p, ds;

  Head(const Case& kase, int b, int h)
      : c(kase),
        batch(b),
        head(h),
        mask(kase.mask(b)),
        q(head_matrix(c, c.q, b, h, mask.rows)),
        k(head_matrix(c, c.k, b, c.heads().key_head(h), mask.keys)),
        v(head_matrix(c, c.v, b, c.heads().key_head(h), mask.keys)),
        grad_o(head_matrix(c, c.grad_o, b, h, mask.rows)),
        p(c.shape.dtype, mask.rows, mask.keys),
        ds(c.shape.dtype, mask.rows, mask.keys) {}

  // P of one row; returns its LSE.
  float weigh(int row) {
    const core::Span keys = core::visible_keys(mask, row);
    float max = -HUGE_VALF;
    for (int key = keys.begin; key < keys.end; ++key) {
      const float score = p.rounded(row_product(q, row, k, key));
      p.set(row, key, score * c.problem.scale);
      max = std::max(max, p.get(row, key));
    }
    float total = 0.0f;
    for (int key = keys.begin; key < keys.end; ++key) {
      total += std::exp(p.get(row, key) - max);
    }
    for (int key = keys.begin; key < keys.end; ++key) {
      p.set(row, key, std::exp(p.get(row, key) - max) / total);
    }
    return keys.empty() ? -HUGE_VALF : max + std::log(total);
  }

  // dS of one row, times the scale.
  void weigh_gradients(int row) {
    const core::Span keys = core::visible_keys(mask, row);
    float delta = 0.0f;
    for (int key = keys.begin; key < keys.end; ++key) {
      ds.set(row, key, row_product(grad_o, row, v, key));
      delta += ds.get(row, key) * p.get(row, key);
    }
    const float shift = delta - static_cast<float>(c.grad_lse.get(c.lse_at(batch, head, row)));
    for (int key = keys.begin; key < keys.end; ++key) {
      const float gradient = ds.rounded(p.get(row, key) * (ds.get(row, key) - shift));
      ds.set(row, key, gradient * c.problem.scale);
    }
  }

  void compare_rows(const Outputs& outputs, const Gradients& gradients, AllSquares* squares) {
    for (int row = 0; row < mask.rows; ++row) {
      const float lse = weigh(row);
      const double true_lse = outputs.lse.get(c.lse_at(batch, head, row));
      if (std::isfinite(true_lse)) {
        squares->lse.add(lse, true_lse);
      }
      weigh_gradients(row);
      compare_row(p, row, v, outputs.o, c.o, &squares->o);
      compare_row(ds, row, k, gradients.q, c.q, &squares->q);
    }
  }

  // (weights b) of one row against a tensor of queries.
  void compare_row(const Matrix& weights, int row, const Matrix& b, const Buffer& truth,
                   const Tensor& t, Squares* squares) const {
    for (int d = 0; d < b.columns(); ++d) {
      float sum = 0.0f;
      for (int key = 0; key < mask.keys; ++key) {
        sum += weights.get(row, key) * b.get(key, d);
      }
      squares->add(weights.rounded(sum), truth.get(c.at(t, batch, head, row, d)));
    }
  }
};

// sum over the heads of a group of weights^T b, against a tensor of keys.
void compare_keys(const std::vector<Head>& group, const Matrix Head::* weights,
                  const Matrix Head::* b, int key_head, const Buffer& truth, const Tensor& t,
                  Squares* squares) {
  const Head& first = group.front();
  for (int key = 0; key < first.mask.keys; ++key) {
    for (int d = 0; d < (first.*b).columns(); ++d) {
      float sum = 0.0f;
      for (const Head& head : group) {
        for (int row = 0; row < head.mask.rows; ++row) {
          sum += (head.*weights).get(row, key) * (head.*b).get(row, d);
        }
      }
      squares->add((first.*b).rounded(sum),
                   truth.get(first.c.at(t, first.batch, key_head, key, d)));
    }
  }
}

}  // namespace

Errors textbook_errors(const Case& c, const Outputs& outputs, const Gradients& gradients) {
  AllSquares squares;
  for (int batch = 0; batch < c.shape.batch; ++batch) {
    for (int key_head = 0; key_head < c.shape.heads_k; ++key_head) {
      std::vector<Head> group;
      group.reserve(static_cast<std::size_t>(c.shape.group));
      for (int g = 0; g < c.shape.group; ++g) {
        group.emplace_back(c, batch, key_head * c.shape.group + g);
        group.back().compare_rows(outputs, gradients, &squares);
      }
      compare_keys(group, &Head::ds, &Head::q, key_head, gradients.k, c.k, &squares.k);
      compare_keys(group, &Head::p, &Head::grad_o, key_head, gradients.v, c.v, &squares.v);
    }
  }
  return Errors{squares.o.rms(), squares.lse.rms(), squares.q.rms(), squares.k.rms(),
                squares.v.rms()};
}

}  // namespace pantile::testing
