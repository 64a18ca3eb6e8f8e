"""cuDNN's FP8 attention through nvidia-cudnn-frontend: the forward in e4m3, one scale per tensor,
all scales 1 unless given."""

from __future__ import annotations

import torch

from pantile.bench.measure import Contender, repeat
from pantile.bench.peers import Problem, first_line

SCALES = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")


class Forward:
    """The graph of one case; `run()` enqueues it and fills `o`, [batch, heads, seq, dim]."""

    def __init__(self, problem: Problem, scales: dict[str, torch.Tensor]) -> None:
        import cudnn

        case = problem.case
        e4m3, f32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
        self.handle = cudnn.create_handle()
        cudnn.set_stream(handle=self.handle, stream=torch.cuda.current_stream().cuda_stream)
        self.graph = graph = cudnn.pygraph(
            io_data_type=e4m3,
            intermediate_data_type=f32,
            compute_data_type=f32,
            handle=self.handle,
        )
        self.bound: dict = {}  # tensor of the graph -> ours

        def operand(name: str, like: torch.Tensor, dtype):
            shape = {"dim": tuple(like.shape), "stride": like.stride()}
            tensor = graph.tensor(name=name, data_type=dtype, **shape)
            self.bound[tensor] = like
            return tensor

        def output(tensor, like: torch.Tensor, dtype) -> None:
            tensor.set_output(True).set_dim(tuple(like.shape)).set_stride(like.stride())
            tensor.set_data_type(dtype)
            self.bound[tensor] = like

        one = torch.ones(1, 1, 1, 1, device="cuda")
        tensors = {"q": problem.q, "k": problem.k, "v": problem.v}
        operands = {n: operand(n, x.transpose(1, 2), e4m3) for n, x in tensors.items()}
        operands |= {name: operand(name, scales.get(name, one), f32) for name in SCALES}
        settings = {"attn_scale": case.head_dim**-0.5, "use_causal_mask": case.causal}
        o, stats, *largest = graph.sdpa_fp8(**operands, is_inference=False, **settings)
        self.o = torch.empty_like(problem.q).transpose(1, 2)
        output(o, self.o, e4m3)
        output(stats, torch.empty(case.batch, case.heads_q, case.seqlen, 1, device="cuda"), f32)
        for tensor in largest:
            output(tensor, torch.zeros_like(one), f32)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A])
        graph.check_support()
        graph.build_plans()
        size_bytes = max(1, graph.get_workspace_size())
        self.workspace = torch.empty(size_bytes, device="cuda", dtype=torch.uint8)
        self.run()

    def run(self) -> None:
        self.graph.execute(self.bound, self.workspace, handle=self.handle)

    def answer(self) -> tuple[torch.Tensor]:
        self.run()
        return (self.o.transpose(1, 2),)


def _lacks(problem: Problem) -> str | None:
    case = problem.case
    if problem.dtype != torch.float8_e4m3fn:
        return "only for e4m3 inputs"
    if problem.differentiates:
        return "only its FP8 forward is measured"
    if case.lengths is not None or case.window_left is not None:
        return "only dense cases without a window are measured"
    if case.heads_q != case.heads_k:
        return "grouped-query heads are not measured"
    return None


def contender(name: str, problem: Problem) -> Contender | str:
    if (reason := _lacks(problem)) is not None:
        return reason
    try:
        forward = Forward(problem, {})
    except ImportError as error:
        return f"nvidia-cudnn-frontend: {first_line(error)}"
    except Exception as error:  # the frontend raises types of its own
        return first_line(error)
    return Contender(name, repeat(forward.run), answer=forward.answer)


def forward(problem: Problem, scales: dict[str, torch.Tensor]) -> torch.Tensor:
    """O in e4m3, [batch, seq, heads, dim], with the given SCALES (one element each). Raises what
    the frontend raises."""
    return Forward(problem, scales).o.transpose(1, 2)
