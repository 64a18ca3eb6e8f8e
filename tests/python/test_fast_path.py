"""Private names of torch: all in one file, and none of the optional ones is missed by a result."""

from __future__ import annotations

import pathlib
import re

import pantile
import pytest
from support import run_python

PACKAGE = pathlib.Path(pantile.__file__).parent
PRIVATE = re.compile(r"\btorch\._(?!_)|\bfrom torch\._|\bforward_ad\._|\._C\._")
# What find() is asked for, wherever that stands; the module attribute is no call of it.
OPTIONAL = sorted(
    {
        path
        for source in PACKAGE.glob("*.py")
        for path in re.findall(r'find\("(torch\.[\w.]+)"\)', source.read_text())
    }
    | {"torch.autograd.forward_ad._current_level", "torch._C.DispatchKey"}
)


def _code(source: str) -> list[str]:
    """Lines without comments and without the paths given to find() and require()."""
    lines = (line.split("#")[0] for line in source.splitlines())
    return [re.sub(r'(find|require)\("[^"]*"\)', "", line) for line in lines]


def test_private_names_of_torch_stand_in_one_file():
    for path in PACKAGE.glob("*.py"):
        if path.name == "_torch_private.py":
            continue
        for number, line in enumerate(_code(path.read_text()), 1):
            guarded = "getattr(torch" in line
            assert guarded or not PRIVATE.search(line), f"{path.name}:{number}: {line}"


SOURCE = """
import os, sys, types
import torch

torch.set_num_threads(1)
torch.manual_seed(0)
q, k, v = (torch.randn(2, n, 2, 16, requires_grad=True) for n in (9, 13, 13))
heads_first = [x.transpose(1, 2) for x in (q, k, v)]
expected = torch.nn.functional.scaled_dot_product_attention(*heads_first).transpose(1, 2)
expected_grads = torch.autograd.grad(expected.sin().sum(), (q, k, v))


class Without(types.ModuleType):
    def __init__(self, module, hidden):
        super().__init__(module.__name__)
        self.__dict__.update(_module=module, _hidden=hidden)

    def __getattr__(self, name):
        if name == self._hidden:
            raise AttributeError(name)
        return getattr(self._module, name)


def hide(path):
    names = path.split(".")
    count = max(i for i in range(1, len(names)) if ".".join(names[:i]) in sys.modules)
    module = ".".join(names[:count])
    real = sys.modules[module]
    sys.modules[module] = Without(real, names[count])
    return module, real


def check(path):
    module, real = hide(path)
    import pantile
    from pantile import _fast_path

    sys.modules[module] = real  # torch itself still needs the name
    assert not _fast_path.AVAILABLE
    operands = [x.detach() for x in (q, k, v)]
    torch.testing.assert_close(pantile.attention(*operands), expected)
    o = pantile.attention(q, k, v)
    torch.testing.assert_close(o, expected)
    grads = torch.autograd.grad(o.sin().sum(), (q, k, v))
    torch.testing.assert_close(grads, expected_grads)
    made = pantile.quantize(*operands)
    assert pantile.attention(made).shape == o.shape
    with torch.autocast("cpu", torch.bfloat16):
        assert pantile.attention(*operands).dtype is torch.bfloat16
    dual = torch.autograd.forward_ad
    with dual.dual_level():
        try:
            pantile.attention(dual.make_dual(operands[0], operands[0]), *operands[1:])
        except (NotImplementedError, RuntimeError):
            return
    raise AssertionError("a tangent was lost")


for path in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        try:
            check(path)
        except BaseException as error:
            print(path, repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, path
print("done")
"""


@pytest.mark.slow
def test_without_a_private_name_calls_take_the_dispatcher():
    assert len(OPTIONAL) > 10
    output = run_python(SOURCE, *OPTIONAL, timeout=600, PANTILE_LOG="")
    assert output.endswith("done\n")


def test_a_name_that_the_operators_need_is_named():
    output = run_python(
        """
        import sys, types
        import torch

        class Without(types.ModuleType):
            def __getattr__(self, name):
                if name == "_AutoDispatchBelowAutograd":
                    raise AttributeError(name)
                return getattr(torch._C, name)

        sys.modules["torch._C"] = Without("torch._C")
        try:
            import pantile
        except ImportError as error:
            print(error)
        """
    )
    assert output.startswith("pantile needs torch._C._AutoDispatchBelowAutograd, which torch ")


def test_this_torch_has_them_all():
    """Or every plain call is slow here: what a new torch renamed is to be found."""
    pytest.importorskip("torch")
    pantile.load_torch()
    from pantile import _torch_private

    assert not _torch_private.missing
