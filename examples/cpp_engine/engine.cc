// A small inference engine: a random model in the shape of Llama, a paged cache, and continuous
// batching: in every step each running request gives either a piece of its prompt or one token, and
// all of them are one ragged batch.
//
//   engine [requests]        (default 24; on the GPU too when the library has CUDA and finds one)
//
// It prints tokens per second, and checks that a request answers with the same tokens when it runs
// alone: attention is cut at fixed keys (KvSplit::fixed), so that its bits depend neither on the
// batch nor on how the prompt was cut. On a GPU only attention runs there.
#include <pantile/pantile.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <iterator>
#include <vector>

#include "memory.h"
#include "model.h"

namespace {

constexpr int kPageSize = 16, kPages = 160, kTablePages = 12;  // a sequence has at most 192 tokens
constexpr int kMostRunning = 8, kMostTokens = 48;              // of a step
constexpr int kSplitKeys = 64;

struct Request {
  std::vector<int> tokens;  // the prompt, then what was generated
  int wanted = 0;           // tokens in all
  int cached = 0;           // of them in the cache
  int row = -1;             // of the block table while it runs
  std::vector<int> pages;
};

Request make_request(int number) {
  Request request;
  std::uint32_t seed = 77u + static_cast<std::uint32_t>(number);
  const auto draw = [&](int limit) {
    seed = seed * 1664525u + 1013904223u;
    return static_cast<int>((seed >> 8) % static_cast<std::uint32_t>(limit));
  };
  const int prompt = 3 + draw(90);
  for (int i = 0; i < prompt; ++i) {
    request.tokens.push_back(draw(Shape().vocabulary));
  }
  request.wanted = prompt + 4 + draw(24);
  return request;
}

// The tokens of one step: rows of one request after the other.
struct Batch {
  std::vector<Request*> requests;
  std::vector<std::int32_t> lengths, bounds = {0}, rows;
  int longest = 0;

  int total() const { return bounds.back(); }
  void add(Request* request, int tokens) {
    requests.push_back(request);
    lengths.push_back(request->cached);
    rows.push_back(request->row);
    bounds.push_back(bounds.back() + tokens);
    longest = std::max(longest, tokens);
  }
};

class Engine {
 public:
  Engine(const Model& model, const pantile::Device& where, const Memory& memory)
      : model_(model), memory_(memory) {
    must(pantile::query_device(where, &device_));
    const Shape& s = model.shape;
    const std::size_t slots = std::size_t{kPages} * kPageSize;
    const std::size_t bytes = slots * static_cast<std::size_t>(s.key_dim()) * sizeof(bf16);
    for (int layer = 0; layer < s.layers; ++layer) {
      keys_.push_back(memory.allocate(bytes));
      values_.push_back(memory.allocate(bytes));
    }
    for (int page = kPages; page-- > 0;) {
      free_pages_.push_back(page);
    }
    for (int row = kMostRunning; row-- > 0;) {
      free_rows_.push_back(row);
    }
    make_rotary();
  }
  ~Engine() {
    for (const auto* list : {&keys_, &values_}) {
      for (void* pointer : *list) {
        memory_.release(pointer);
      }
    }
  }

  // Runs all requests to their ends; the tokens that went through the model.
  int serve(std::vector<Request>* requests) {
    std::deque<Request*> waiting;
    for (Request& request : *requests) {
      waiting.push_back(&request);
    }
    std::vector<Request*> running;
    int tokens = 0;
    while (!waiting.empty() || !running.empty()) {
      while (!waiting.empty() && admit(waiting.front())) {
        running.push_back(waiting.front());
        waiting.pop_front();
      }
      const Batch batch = choose(running);
      step(batch);
      tokens += batch.total();
      const auto done = [this](Request* request) { return finish(request); };
      running.erase(std::remove_if(running.begin(), running.end(), done), running.end());
    }
    return tokens;
  }

  double attention_seconds() const { return attention_seconds_; }
  const char* kernel() const { return kernel_; }

 private:
  // A row and the pages for all that the request will ever hold.
  bool admit(Request* request) {
    const auto pages = static_cast<std::size_t>((request->wanted + kPageSize - 1) / kPageSize);
    if (free_rows_.empty() || free_pages_.size() < pages || pages > kTablePages) {
      return false;
    }
    request->row = free_rows_.back();
    free_rows_.pop_back();
    for (std::size_t i = 0; i < pages; ++i) {
      table_[static_cast<std::size_t>(request->row) * kTablePages + i] = free_pages_.back();
      request->pages.push_back(free_pages_.back());
      free_pages_.pop_back();
    }
    return true;
  }

  bool finish(Request* request) {
    if (static_cast<int>(request->tokens.size()) < request->wanted) {
      return false;
    }
    free_rows_.push_back(request->row);
    free_pages_.insert(free_pages_.end(), request->pages.begin(), request->pages.end());
    return true;
  }

  static Batch choose(const std::vector<Request*>& running) {
    Batch batch;
    int left = kMostTokens;
    for (Request* request : running) {
      const int there = static_cast<int>(request->tokens.size()) - request->cached;
      const int tokens = std::min(there, left);
      if (tokens > 0) {
        batch.add(request, tokens);
        left -= tokens;
      }
    }
    return batch;
  }

  void make_rotary() {
    const int half = model_.shape.head_dim / 2;
    std::vector<float> cosines, sines;
    for (int position = 0; position < kTablePages * kPageSize; ++position) {
      for (int i = 0; i < half; ++i) {
        const double angle = position * std::pow(10000.0, -1.0 * i / half);
        cosines.push_back(static_cast<float>(std::cos(angle)));
        sines.push_back(static_cast<float>(std::sin(angle)));
      }
    }
    cos_.upload(cosines);
    sin_.upload(sines);
  }

  pantile::KvProblem problem(const Batch& batch) const {
    const Shape& s = model_.shape;
    pantile::KvProblem p;
    p.dtype = pantile::DType::bf16;
    p.batch = static_cast<std::int64_t>(batch.requests.size());
    p.heads_q = s.heads;
    p.heads_k = s.key_heads;
    p.head_dim = p.head_dim_v = s.head_dim;
    p.packed_q = p.packed_new = true;
    p.seqlen_q = p.seqlen_new = batch.longest;
    p.total_q = p.total_new = batch.total();
    p.blocks = kPages;
    p.page_size = kPageSize;
    p.table_rows = kMostRunning;
    p.table_pages = p.table_stride = kTablePages;
    p.has_cache_index = true;
    p.window_right = 0;
    p.scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim));
    p.split = pantile::KvSplit::fixed;
    p.split_keys = kSplitKeys;
    p.rotary_dim = s.head_dim;
    p.rotates_q = true;
    p.rotary_positions = kTablePages * kPageSize;
    p.rotary_stride = s.head_dim / 2;
    p.q = p.o = p.q_rotated = pantile::Layout{0, s.query_dim(), s.head_dim, 16};
    p.k_new = p.v_new = pantile::Layout{0, s.key_dim(), s.head_dim, 16};
    p.k = p.v =
        pantile::CacheLayout{std::int64_t{kPageSize} * s.key_dim(), s.key_dim(), s.head_dim, 16};
    return p;
  }

  // What all layers of a step share.
  struct Step {
    pantile::AppendPlan append;
    pantile::DecodePlan decode;
    pantile::KvTensors tensors;
    void* workspace;
  };

  Step plan(const Batch& batch) {
    Step step;
    const pantile::KvProblem p = problem(batch);
    must(pantile::plan_append(p, device_, {}, &step.append));
    must(pantile::plan_decode(p, device_, {}, &step.decode));
    step.workspace = workspace_.of(step.decode.workspace.bytes + 256);
    pantile::KvTensors& t = step.tensors;
    t.lengths = lengths_.upload(batch.lengths);
    t.cu_seqlens_q = t.cu_seqlens_new = bounds_.upload(batch.bounds);
    t.cache_index = rows_.upload(batch.rows);
    t.block_table = block_table_.upload(table_);
    t.rotary_cos = cos_.of(0);
    t.rotary_sin = sin_.of(0);
    const auto ints = static_cast<std::size_t>(step.decode.schedule_ints);
    auto* const schedule = static_cast<std::int32_t*>(schedule_.of((ints + 1) * sizeof(int)));
    must(pantile::run_schedule(step.decode, t, schedule, nullptr));
    t.schedule = schedule;
    kernel_ = step.decode.kernel->name;
    return step;
  }

  // Of all rows of the batch; q, k and v in bf16.
  std::vector<bf16> attend(Step* step, int layer, const std::vector<bf16>& q,
                           const std::vector<bf16>& k, const std::vector<bf16>& v) {
    const auto start = std::chrono::steady_clock::now();
    std::vector<bf16> o(q.size());
    const std::size_t bytes = q.size() * sizeof(bf16);
    pantile::KvTensors& t = step->tensors;
    t.q = q_.upload(q);
    t.k_new = k_new_.upload(k);
    t.v_new = v_new_.upload(v);
    t.q_rotated = rotated_.of(bytes);
    t.o = o_.of(bytes);
    t.k = keys_[static_cast<std::size_t>(layer)];
    t.v = values_[static_cast<std::size_t>(layer)];
    must(pantile::run_append(step->append, t, nullptr));
    t.q = t.q_rotated;
    must(pantile::run_decode(step->decode, t, step->workspace, nullptr));
    memory_.download(o.data(), t.o, bytes);
    attention_seconds_ +=
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return o;
  }

  void step(const Batch& batch) {
    const auto count = static_cast<std::size_t>(batch.total());
    std::vector<std::vector<float>> rows;
    for (std::size_t b = 0; b < batch.requests.size(); ++b) {
      for (std::int32_t i = 0; i < batch.bounds[b + 1] - batch.bounds[b]; ++i) {
        const Request& request = *batch.requests[b];
        const float* const row =
            model_.embedding.row(request.tokens[static_cast<std::size_t>(request.cached + i)]);
        rows.emplace_back(row, row + model_.shape.dim);
      }
    }
    Step shared = plan(batch);
    for (int number = 0; number < model_.shape.layers; ++number) {
      const Layer& layer = model_.layers[static_cast<std::size_t>(number)];
      std::vector<bf16> q, k, v;
      for (const std::vector<float>& row : rows) {
        const std::vector<float> x = normalised(row);
        append_rounded(layer.q.times(x), &q);
        append_rounded(layer.k.times(x), &k);
        append_rounded(layer.v.times(x), &v);
      }
      const std::vector<bf16> o = attend(&shared, number, q, k, v);
      const std::size_t width = o.size() / count;
      for (std::size_t i = 0; i < count; ++i) {
        std::vector<float> head(width);
        std::transform(o.begin() + static_cast<std::ptrdiff_t>(i * width),
                       o.begin() + static_cast<std::ptrdiff_t>((i + 1) * width), head.begin(),
                       to_float);
        add(&rows[i], layer.o.times(head));
        add(&rows[i], feed_forward(layer, normalised(rows[i])));
      }
    }
    take_tokens(batch, rows);
  }

  static void append_rounded(const std::vector<float>& from, std::vector<bf16>* to) {
    std::transform(from.begin(), from.end(), std::back_inserter(*to), to_bf16);
  }

  // The next token of each request whose last one was in the batch.
  void take_tokens(const Batch& batch, const std::vector<std::vector<float>>& rows) const {
    for (std::size_t b = 0; b < batch.requests.size(); ++b) {
      Request& request = *batch.requests[b];
      request.cached += batch.bounds[b + 1] - batch.bounds[b];
      if (request.cached == static_cast<int>(request.tokens.size())) {
        const auto last = static_cast<std::size_t>(batch.bounds[b + 1] - 1);
        request.tokens.push_back(likeliest(model_.embedding.times(normalised(rows[last]))));
      }
    }
  }

  const Model& model_;
  const Memory& memory_;
  pantile::DeviceProps device_;
  std::vector<void*> keys_, values_;  // of each layer: [pages, page size, key heads, head dim]
  std::vector<int> free_pages_, free_rows_;
  std::vector<std::int32_t> table_ = std::vector<std::int32_t>(kMostRunning * kTablePages);
  Block lengths_{memory_}, bounds_{memory_}, rows_{memory_}, block_table_{memory_};
  Block cos_{memory_}, sin_{memory_}, schedule_{memory_}, workspace_{memory_};
  Block q_{memory_}, rotated_{memory_}, o_{memory_}, k_new_{memory_}, v_new_{memory_};
  double attention_seconds_ = 0.0;
  const char* kernel_ = "";
};

void run_on(const pantile::Device& where, const Memory& memory, int count) {
  const Model model(1);
  std::vector<Request> requests;
  for (int number = 0; number < count; ++number) {
    requests.push_back(make_request(number));
  }
  Engine engine(model, where, memory);
  const auto start = std::chrono::steady_clock::now();
  const int tokens = engine.serve(&requests);
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  std::printf("%-28s %d requests, %d tokens, %.0f tokens/s; attention %.0f %% of the time\n",
              engine.kernel(), count, tokens, tokens / seconds,
              100.0 * engine.attention_seconds() / seconds);
  for (const int number : {0, count / 2, count - 1}) {
    std::vector<Request> alone = {make_request(number)};
    Engine other(model, where, memory);
    other.serve(&alone);
    if (alone[0].tokens != requests[static_cast<std::size_t>(number)].tokens) {
      std::fprintf(stderr, "request %d answers otherwise when it runs alone\n", number);
      std::exit(1);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int count = argc > 1 ? std::atoi(argv[1]) : 24;
  if (count < 1) {
    std::fprintf(stderr, "requests is %d; it must be 1 or more\n", count);
    return 1;
  }
  std::printf("%s\n", pantile::build_info());
  run_on({pantile::DeviceType::cpu, 0}, heap(), count);
#if defined(ENGINE_CUDA)
  pantile::Status why;
  if (pantile::cuda_device_count(&why) > 0) {
    run_on({pantile::DeviceType::cuda, 0}, gpu(), count);
  } else {
    std::printf("no GPU: %s\n", why.message());
  }
#endif
  return 0;
}
