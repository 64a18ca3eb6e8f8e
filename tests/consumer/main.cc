// Uses every public function once, from outside, and checks the answer of a small attention call
// against one written out here.
#include <pantile/pantile.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

constexpr int kRows = 5, kKeys = 7, kDim = 8;

void require(bool good, const char* what, const char* detail = "") {
  if (!good) {
    std::fprintf(stderr, "consumer: %s failed. %s\n", what, detail);
    std::exit(1);
  }
}

void require(const pantile::Status& status, const char* what) {
  require(status.ok(), what, status.message());
}

pantile::ForwardProblem causal_problem() {
  pantile::ForwardProblem problem;
  problem.dtype = pantile::DType::f32;
  problem.batch = problem.heads_q = problem.heads_k = 1;
  problem.seqlen_q = kRows;
  problem.seqlen_k = kKeys;
  problem.head_dim = problem.head_dim_v = kDim;
  problem.window_right = 0;
  problem.scale = 0.5f;
  problem.q = problem.o = pantile::Layout{kRows * kDim, kDim, kDim, 4};
  problem.k = problem.v = pantile::Layout{kKeys * kDim, kDim, kDim, 4};
  return problem;
}

struct Data {
  std::vector<float> q = std::vector<float>(kRows * kDim), k = std::vector<float>(kKeys * kDim),
                     v = std::vector<float>(kKeys * kDim), o = std::vector<float>(kRows * kDim),
                     lse = std::vector<float>(kRows);
  Data() {
    for (std::size_t i = 0; i < q.size(); ++i) {
      q[i] = std::sin(static_cast<float>(i));
    }
    for (std::size_t i = 0; i < k.size(); ++i) {
      k[i] = std::cos(0.7f * static_cast<float>(i));
      v[i] = std::sin(1.3f * static_cast<float>(i));
    }
  }
};

// Largest difference between `data.o` and softmax(Q K^T * scale) V written out, causal.
double largest_error(const Data& data) {
  double worst = 0;
  for (int row = 0; row < kRows; ++row) {
    const int visible = row + kKeys - kRows + 1;
    std::vector<double> p(static_cast<std::size_t>(visible));
    double sum = 0;
    for (int key = 0; key < visible; ++key) {
      double score = 0;
      for (int d = 0; d < kDim; ++d) {
        score += 1.0 * data.q[static_cast<std::size_t>(row * kDim + d)] *
                 data.k[static_cast<std::size_t>(key * kDim + d)];
      }
      p[static_cast<std::size_t>(key)] = std::exp(0.5 * score);
      sum += p[static_cast<std::size_t>(key)];
    }
    for (int d = 0; d < kDim; ++d) {
      double value = 0;
      for (int key = 0; key < visible; ++key) {
        value += p[static_cast<std::size_t>(key)] / sum *
                 data.v[static_cast<std::size_t>(key * kDim + d)];
      }
      worst = std::fmax(worst, std::fabs(value - data.o[static_cast<std::size_t>(row * kDim + d)]));
    }
    worst = std::fmax(worst, std::fabs(std::log(sum) - data.lse[static_cast<std::size_t>(row)]));
  }
  return worst;
}

void check_forward_and_backward() {
  pantile::DeviceProps device;
  require(pantile::query_device({}, &device), "query_device");
  const pantile::ForwardProblem problem = causal_problem();
  pantile::ForwardPlan plan;
  require(pantile::plan_forward(problem, device, {}, &plan), "plan_forward");

  Data data;
  pantile::ForwardTensors tensors;
  tensors.q = data.q.data();
  tensors.k = data.k.data();
  tensors.v = data.v.data();
  tensors.o = data.o.data();
  tensors.lse = data.lse.data();
  require(pantile::check_sequences(problem, tensors), "check_sequences");
  void* workspace = std::aligned_alloc(256, (plan.workspace.bytes + 511) / 256 * 256);
  require(pantile::run_forward(plan, tensors, workspace, nullptr), "run_forward");
  std::free(workspace);
  const double error = largest_error(data);
  require(error < 1e-5, "comparison with attention written out");

  pantile::BackwardProblem backward;
  backward.forward = problem;
  backward.grad_o = backward.grad_q = problem.q;
  backward.grad_k = backward.grad_v = problem.k;
  pantile::BackwardPlan backward_plan;
  require(pantile::plan_backward(backward, device, {}, &backward_plan), "plan_backward");
  std::vector<float> grad_o(data.o.size(), 1.0f), grad_q(data.q.size(), NAN),
      grad_k(data.k.size(), NAN), grad_v(data.v.size(), NAN);
  pantile::BackwardTensors gradients;
  gradients.forward = tensors;
  gradients.grad_o = grad_o.data();
  gradients.grad_q = grad_q.data();
  gradients.grad_k = grad_k.data();
  gradients.grad_v = grad_v.data();
  workspace = std::aligned_alloc(256, (backward_plan.workspace.bytes + 511) / 256 * 256);
  require(pantile::run_backward(backward_plan, gradients, workspace, nullptr), "run_backward");
  std::free(workspace);
  // Each row's probabilities sum to 1, so with dO = 1 the elements of dV sum to rows * dim.
  double sum = 0;
  for (const float value : grad_v) {
    sum += value;
  }
  require(std::fabs(sum - kRows * kDim) < 1e-3, "sum of dV");
  std::printf("largest error %.1e on %s, kernel %s\n", error, device.name, plan.kernel->name);
}

void check_questions() {
  const pantile::ForwardProblem problem = causal_problem();
  pantile::DeviceProps device;
  require(pantile::query_device({}, &device), "query_device");
  std::vector<pantile::Verdict> verdicts(static_cast<std::size_t>(pantile::kernel_count()));
  const int rows =
      pantile::explain_forward(problem, device, {}, verdicts.data(), pantile::kernel_count());
  require(rows > 0 && rows <= pantile::kernel_count(), "explain_forward");
  int chosen = 0;
  for (int i = 0; i < rows; ++i) {
    chosen += verdicts[static_cast<std::size_t>(i)].chosen;
  }
  require(chosen == 1, "one chosen row");
  pantile::ForwardProblem bad = problem;
  bad.scale = NAN;
  pantile::ForwardPlan plan;
  require(!pantile::plan_forward(bad, device, {}, &plan).ok(), "refusal of a NaN scale");
  bad = problem;
  bad.wants_o_low = true;
  require(!pantile::plan_forward(bad, device, {}, &plan).ok(), "refusal of low bits of a float O");
  pantile::Status status;
  const int gpus = pantile::cuda_device_count(&status);
  std::printf("%s\n%d CUDA devices %s\n", pantile::build_info(), gpus, status.message());
}

}  // namespace

int main() {
  check_questions();
  check_forward_and_backward();
  return 0;
}
