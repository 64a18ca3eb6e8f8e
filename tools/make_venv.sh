#!/usr/bin/env bash
# tools/make_venv.sh VENV PYTHON: makes the virtual environment that the Makefile works in.
#
# With a GPU and a torch that sees it, that torch is used. Without a GPU the CPU build of torch is
# installed, which is a tenth of the size of the CUDA build.
set -euo pipefail
venv=$1
python=$2
torch_version=2.13.0

"$python" - <<'CHECK'
import sys
if sys.version_info < (3, 10):
    raise SystemExit(f"pantile needs Python 3.10 or later, this is {sys.version.split()[0]}")
CHECK

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; }
torch_sees_gpu() {
  "$python" -c 'import torch; raise SystemExit(not torch.cuda.is_available())' 2>/dev/null
}

if torch_sees_gpu; then
  "$python" -m venv --system-site-packages "$venv"
else
  "$python" -m venv "$venv"
fi
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
  if has_gpu; then
    pip install "torch==$torch_version"
  else
    # The CPU build carries a local version, which PyPI does not hold: a local folder of wheels may,
    # PyTorch's own index does, and on other platforms the plain version is the CPU build.
    pip install --quiet "torch==$torch_version+cpu" 2>/dev/null ||
      pip install "torch==$torch_version" --index-url https://download.pytorch.org/whl/cpu ||
      pip install "torch==$torch_version"
  fi
fi

# What pyproject.toml lists for building, testing and the demo.
mapfile -t needed < <("$venv/bin/python" - <<'LIST'
try:
    import tomllib
except ImportError:
    from pip._vendor import tomli as tomllib
with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)
extras = project["project"]["optional-dependencies"]
print(*project["build-system"]["requires"], sep="\n")
print(*extras["demo"], *extras["test"], *extras["dev"], sep="\n")
LIST
)
# The machine's own CMake and Ninja where they are new enough.
cmake_version=$(cmake --version 2>/dev/null | sed -n 's/^cmake version \([0-9.]*\).*/\1/p' || true)
if [ "$(printf '%s\n' 3.25 "${cmake_version:-0}" | sort -V | head -n 1)" != 3.25 ]; then
  needed+=("cmake>=3.25")
fi
command -v ninja >/dev/null || needed+=(ninja)
pip install --quiet "${needed[@]}"
