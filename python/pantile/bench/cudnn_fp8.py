"""cuDNN's FP8 attention through nvidia-cudnn-frontend: e4m3, one scale per tensor, all scales 1."""

from __future__ import annotations

import torch

from pantile.bench.measure import Contender, repeat
from pantile.bench.peers import FP8, Problem, first_line

BACKWARD_SCALES = (
    "descale_q descale_k descale_v descale_o descale_dO descale_s descale_dP "
    "scale_s scale_dQ scale_dK scale_dV scale_dP"
)
FORWARD_SCALES = "descale_q descale_k descale_v descale_s scale_s scale_o"


class _Graphs:
    """Forward, and on request backward, of one case. `run(which)` enqueues one of them."""

    def __init__(self, cudnn, problem: Problem, scales: dict[str, torch.Tensor]) -> None:
        case = problem.case
        self.cudnn = cudnn
        self.handle = cudnn.create_handle()
        stream = torch.cuda.current_stream().cuda_stream
        cudnn.set_stream(handle=self.handle, stream=stream)
        self.scale = case.head_dim**-0.5
        self.causal = case.causal
        self.q, self.k, self.v = (x.transpose(1, 2) for x in (problem.q, problem.k, problem.v))
        self.grad_o = problem.grad_o.to(FP8).transpose(1, 2)
        self.o = torch.empty_like(problem.q).transpose(1, 2)
        rows = (case.batch, case.heads_q, case.seqlen, 1)
        self.stats = torch.empty(rows, device="cuda", dtype=torch.float32)
        self.one = torch.ones(1, 1, 1, 1, device="cuda")
        self.scales = scales
        self.plans: dict[str, tuple] = {}

    def _graph(self):
        e4m3, f32 = self.cudnn.data_type.FP8_E4M3, self.cudnn.data_type.FLOAT
        return self.cudnn.pygraph(
            io_data_type=e4m3,
            intermediate_data_type=f32,
            compute_data_type=f32,
            handle=self.handle,
        )

    def _tensor(self, graph, name: str, like: torch.Tensor, dtype):
        return graph.tensor(name=name, dim=tuple(like.shape), stride=like.stride(), data_type=dtype)

    def _scalars(self, graph, names: str, bound: dict) -> dict:
        scalars = {}
        for name in names.split():
            scalars[name] = self._tensor(graph, name, self.one, self.cudnn.data_type.FLOAT)
            bound[scalars[name]] = self.scales.get(name, self.one)
        return scalars

    def _output(self, tensor, like: torch.Tensor, dtype, bound: dict) -> None:
        tensor.set_output(True).set_dim(tuple(like.shape)).set_stride(like.stride())
        tensor.set_data_type(dtype)
        bound[tensor] = like

    def _finish(self, which: str, graph, bound: dict) -> None:
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([self.cudnn.heur_mode.A])
        graph.check_support()
        graph.build_plans()
        bytes_ = max(1, graph.get_workspace_size())
        workspace = torch.empty(bytes_, device="cuda", dtype=torch.uint8)
        self.plans[which] = (graph, bound, workspace)

    def build_forward(self) -> None:
        graph, bound = self._graph(), {}
        e4m3, f32 = self.cudnn.data_type.FP8_E4M3, self.cudnn.data_type.FLOAT
        operands = {}
        for name in ("q", "k", "v"):
            operands[name] = self._tensor(graph, name, getattr(self, name), e4m3)
            bound[operands[name]] = getattr(self, name)
        o, stats, *largest = graph.sdpa_fp8(
            **operands,
            **self._scalars(graph, FORWARD_SCALES, bound),
            is_inference=False,
            attn_scale=self.scale,
            use_causal_mask=self.causal,
        )
        self._output(o, self.o, e4m3, bound)
        self._output(stats, self.stats, f32, bound)
        for tensor in largest:
            self._output(tensor, torch.zeros_like(self.one), f32, bound)
        self._finish("forward", graph, bound)

    def build_backward(self) -> None:
        graph, bound = self._graph(), {}
        e4m3, f32 = self.cudnn.data_type.FP8_E4M3, self.cudnn.data_type.FLOAT
        operands = {}
        for name, source in (
            ("q", self.q),
            ("k", self.k),
            ("v", self.v),
            ("o", self.o),
            ("dO", self.grad_o),
        ):
            operands[name] = self._tensor(graph, name, source, e4m3)
            bound[operands[name]] = source
        operands["stats"] = self._tensor(graph, "stats", self.stats, f32)
        bound[operands["stats"]] = self.stats
        outputs = graph.sdpa_fp8_backward(
            **operands,
            **self._scalars(graph, BACKWARD_SCALES, bound),
            attn_scale=self.scale,
            use_causal_mask=self.causal,
        )
        self.gradients = tuple(torch.empty_like(x) for x in (self.q, self.k, self.v))
        for tensor, gradient in zip(outputs[:3], self.gradients, strict=True):
            self._output(tensor, gradient, e4m3, bound)
        for tensor in outputs[3:]:
            self._output(tensor, torch.zeros_like(self.one), f32, bound)
        self._finish("backward", graph, bound)

    def run(self, which: str) -> None:
        graph, bound, workspace = self.plans[which]
        graph.execute(bound, workspace, handle=self.handle)

    def answer(self, which: str) -> tuple:
        """What `run` computes, [batch, seq, heads, dim]."""
        self.run(which)
        results = (self.o,) if which == "forward" else self.gradients
        return tuple(x.transpose(1, 2) for x in results)


def _lacks(problem: Problem) -> str | None:
    case = problem.case
    if problem.dtype != FP8:
        return "only for e4m3 inputs"
    if problem.what == "forward+backward":
        return "forward and backward are measured apart"
    if case.lengths is not None or case.window_left is not None:
        return "only dense cases without a window are measured"
    if case.heads_q != case.heads_k:
        return "grouped-query heads are not measured"
    return None


def _graphs(problem: Problem, scales: dict[str, torch.Tensor]) -> _Graphs:
    import cudnn

    graphs = _Graphs(cudnn, problem, scales)
    graphs.build_forward()
    graphs.run("forward")
    return graphs


def contender(name: str, problem: Problem) -> Contender | str:
    if (reason := _lacks(problem)) is not None:
        return reason
    try:
        graphs = _graphs(problem, {})
        if problem.what == "backward":
            graphs.build_backward()
            graphs.run("backward")
    except ImportError as error:
        return f"nvidia-cudnn-frontend: {first_line(error)}"
    except Exception as error:  # the frontend raises types of its own
        return first_line(error)
    return Contender(
        name,
        repeat(lambda: graphs.run(problem.what)),
        answer=lambda: graphs.answer(problem.what),
    )


def forward(problem: Problem, scales: dict[str, torch.Tensor]) -> torch.Tensor:
    """O in e4m3, [batch, seq, heads, dim], with the given scales of FORWARD_SCALES (one element
    each; absent ones are 1). Raises what the frontend raises."""
    return _graphs(problem, scales).o.transpose(1, 2)
