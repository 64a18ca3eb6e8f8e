// A model in the shape of Llama with random weights: RMS norms, grouped heads, SwiGLU. Everything
// but attention is here, in float32 on one thread, to stay without further libraries.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

using bf16 = std::uint16_t;  // the upper half of a float

inline bf16 to_bf16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<bf16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);  // round to nearest even
}

inline float to_float(bf16 value) {
  const std::uint32_t bits = static_cast<std::uint32_t>(value) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

struct Shape {
  int vocabulary = 512, layers = 3, dim = 192, heads = 6, key_heads = 2, head_dim = 32,
      hidden = 384;
  int query_dim() const { return heads * head_dim; }
  int key_dim() const { return key_heads * head_dim; }
};

// Rows of the output, each a row of inputs.
struct Matrix {
  int rows = 0, columns = 0;
  std::vector<float> numbers;

  Matrix(int rows_, int columns_, std::uint32_t* seed) : rows(rows_), columns(columns_) {
    numbers.resize(static_cast<std::size_t>(rows) * static_cast<std::size_t>(columns));
    const float size = std::sqrt(3.0f / static_cast<float>(columns));
    for (float& number : numbers) {
      *seed = *seed * 1664525u + 1013904223u;
      number = size * (static_cast<float>(*seed >> 8) / (1 << 23) - 1.0f);
    }
  }
  const float* row(int index) const {
    return numbers.data() + static_cast<std::size_t>(index) * static_cast<std::size_t>(columns);
  }
  std::vector<float> times(const std::vector<float>& x) const {
    std::vector<float> y(static_cast<std::size_t>(rows));
    for (int i = 0; i < rows; ++i) {
      const float* const weights = row(i);
      float sums[8] = {};  // in one order, whatever else is in the batch
      for (int j = 0; j < columns; ++j) {
        sums[j % 8] += weights[j] * x[static_cast<std::size_t>(j)];
      }
      y[static_cast<std::size_t>(i)] =
          ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
    }
    return y;
  }
};

struct Layer {
  Matrix q, k, v, o, gate, up, down;
  Layer(const Shape& s, std::uint32_t* seed)
      : q(s.query_dim(), s.dim, seed),
        k(s.key_dim(), s.dim, seed),
        v(s.key_dim(), s.dim, seed),
        o(s.dim, s.query_dim(), seed),
        gate(s.hidden, s.dim, seed),
        up(s.hidden, s.dim, seed),
        down(s.dim, s.hidden, seed) {}
};

struct Model {
  Shape shape;
  std::vector<Layer> layers;
  Matrix embedding;  // and, transposed, the head

  explicit Model(std::uint32_t seed) : embedding(shape.vocabulary, shape.dim, &seed) {
    for (int layer = 0; layer < shape.layers; ++layer) {
      layers.emplace_back(shape, &seed);
    }
  }
};

inline std::vector<float> normalised(const std::vector<float>& x) {
  float squares = 1e-6f;
  for (const float value : x) {
    squares += value * value / static_cast<float>(x.size());
  }
  std::vector<float> y(x);
  for (float& value : y) {
    value /= std::sqrt(squares);
  }
  return y;
}

inline void add(std::vector<float>* x, const std::vector<float>& y) {
  for (std::size_t i = 0; i < x->size(); ++i) {
    (*x)[i] += y[i];
  }
}

inline std::vector<float> feed_forward(const Layer& layer, const std::vector<float>& x) {
  std::vector<float> gate = layer.gate.times(x);
  const std::vector<float> up = layer.up.times(x);
  for (std::size_t i = 0; i < gate.size(); ++i) {
    gate[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
  }
  return layer.down.times(gate);
}

inline int likeliest(const std::vector<float>& scores) {
  std::size_t best = 0;
  for (std::size_t i = 1; i < scores.size(); ++i) {
    best = scores[i] > scores[best] ? i : best;
  }
  return static_cast<int>(best);
}
