#!/usr/bin/env bash
# install.sh VENV: makes the virtual environment .venv-vllm, with vLLM's engine for a machine without a GPU, on the torch
# of another environment, VENV, where the library is installed: by its entry point vLLM knows our backends. No compiler is
# used. From the root of the repository.
set -euo pipefail
"$1/bin/python" -m venv --clear .venv-vllm
pip() { .venv-vllm/bin/python -m pip --quiet --disable-pip-version-check "$@"; }
site=$(.venv-vllm/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
"$1/bin/python" -c 'import sys; print(*[path for path in sys.path if path.endswith("site-packages")], sep="\n")' \
    > "$site/torch_of_another_environment.pth"
pip install pip==26.3 # finds these versions in a third of the time that older ones take
pip install --no-compile --no-deps --requirement tests/engines/vllm/requirements.txt
# "empty" is Python alone; without the override pip takes 0.33.0+empty for another version.
VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=0.33.0 \
    pip install --no-compile --no-deps --no-build-isolation --no-binary=vllm vllm==0.33.0
