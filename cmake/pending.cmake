# Definitions that stand in for parts of the tree that are still being written, each gone as soon as
# its file exists.
set(_pending "#include \"backend.h\"\n#include \"cpu/backend.h\"\n#include \"hopper/plan.h\"\nnamespace pantile {\n")
set(_no "{ return Status::error(StatusCode::unavailable, \"not in the tree yet\"); }\n")
set(_cpu ${PROJECT_SOURCE_DIR}/cpp/cpu)
if(NOT (EXISTS ${_cpu}/sources.cmake AND EXISTS ${_cpu}/backend.cc AND EXISTS ${_cpu}/reference.cc
    AND EXISTS ${_cpu}/isa/kernels.cc))
  set(PANTILE_PENDING_CPU ON)
  string(APPEND _pending "void set_parallel_for(ParallelFor) {}\nnamespace cpu {\n"
    "CpuIsa detect_isa() { return CpuIsa::baseline; }\n"
    "Status accept_forward(const KernelInfo&, const ForwardProblem&, const DeviceProps&) ${_no}"
    "Status accept_backward(const KernelInfo&, const BackwardProblem&, const DeviceProps&) ${_no}"
    "Status run_forward(const ForwardPlan&, const ForwardTensors&, void*, void*) ${_no}"
    "Status run_backward(const BackwardPlan&, const BackwardTensors&, void*, void*) ${_no}"
    "Status reference_forward(const ForwardPlan&, const ForwardTensors&, void*, void*) ${_no}"
    "Status reference_backward(const BackwardPlan&, const BackwardTensors&, void*, void*) ${_no}"
    "void configure_forward(ForwardPlan*) {}\nvoid configure_backward(BackwardPlan*) {}\n"
    "void configure_reference_forward(ForwardPlan*) {}\n"
    "void configure_reference_backward(BackwardPlan*) {}\n}\n")
endif()
if(NOT EXISTS ${PROJECT_SOURCE_DIR}/cuda/hopper/plan_forward.cc)
  string(APPEND _pending "namespace hopper {\n"
    "Status accept_forward(const KernelInfo&, const ForwardProblem&, const DeviceProps&) ${_no}"
    "void configure_forward(ForwardPlan*) {}\n}\n")
endif()
string(APPEND _pending "}\n")
file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/generated/pending.cc CONTENT "${_pending}" @ONLY)
target_sources(pantile PRIVATE ${PROJECT_BINARY_DIR}/generated/pending.cc)
