#!/usr/bin/env bash
# Packs vLLM 0.33.0 for a Hopper machine without a network that has torch 2.11+cu130, Triton 3.6, transformers and nvcc 13
# (Python 3.12, Linux):
#   bundle.sh FOLDER     writes FOLDER/engine (31 MiB: vLLM and its packages) and FOLDER/vendors (19): minutes
# All comes from published wheels. vLLM asks for torch 2.14; its extensions use the stable ABI and load on 2.11. Of each,
# the code of sm_90 is kept (slim.py). FlashAttention-2 (300 MiB) stays behind: vLLM imports its module and does not call it.
set -euo pipefail
out=${1:?usage: bundle.sh FOLDER}
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out/engine" "$out/vendors"

fetch() {  # FOLDER PACKAGE==VERSION ...: wheels for the GPU machine, without what they depend on, unpacked
  local site=$1 wheels platforms=()
  shift
  wheels=$(mktemp -d -p "$work")
  for tag in 2_39 2_35 2_34 2_31 2_28 2_27 2_24 2_17 2_12 2_5 1; do platforms+=(--platform "manylinux_${tag}_x86_64"); done
  "$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    --abi cp312 --abi abi3 --abi none "${platforms[@]}" --platform manylinux1_x86_64 --platform manylinux2010_x86_64 \
    --platform manylinux2014_x86_64 --platform any --dest "$wheels" "$@"
  for wheel in "$wheels"/*.whl; do "$python" -m zipfile -e "$wheel" "$site"; done
}
slim() {  # EXTENSION TO: the device code of sm_90 alone
  mkdir -p "$(dirname "$2")"
  strip --strip-unneeded -o "$work/stripped.so" "$1"
  "$python" "$here/slim.py" "$work/stripped.so" 90 "$2"
}
pack() {  # FOLDER ARCHIVE
  find "$1" -name __pycache__ -prune -exec rm -rf {} +
  tar -C "$1" -cf - . | xz -T0 -6 > "$2"
}

fetch "$work/wheel" vllm==0.33.0
wheel=$work/wheel/vllm site=$work/engine/vllm
for name in _C_stable_libtorch _flashmla_C _flashmla_extension_C; do slim "$wheel/$name.abi3.so" "$site/$name.abi3.so"; done
slim "$wheel/vllm_flash_attn/_vllm_fa3_C.abi3.so" "$work/fa3/vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"
find "$wheel" -name '*.so' -delete
rm -rf "$wheel"/{vllm-rs,third_party/deep_gemm,third_party/fmha_sm100}
cp -r "$work"/wheel/* "$work/engine/"
echo '"""FlashAttention-2 was left behind."""' > "$site/vllm_flash_attn/_vllm_fa2_C.py"
pack "$work/engine" "$out/engine/vllm.tar.xz"
pack "$work/fa3" "$out/vendors/fa3.tar.xz"

fetch "$work/packages" annotated-types==0.8.0 apache-tvm-ffi==0.1.11 blake3==1.0.11 cachetools==8.0.1 cbor2==6.3.0 \
  compressed-tensors==0.17.0 fastapi==0.136.3 httpcore2==2.16.2 httpx2==2.16.2 ijson==3.6.0 jiter==0.19.0 \
  llguidance==1.7.6 loguru==0.7.3 msgspec==0.22.0 openai==3.54.0 orjson==3.13.0 oss-harmony==0.0.11 \
  partial-json-parser==0.2.1.1.post7 pybase64==1.5.1 pydantic==2.14.3 pydantic_core==2.50.4 python-json-logger==4.2.0 \
  pyzmq==27.3.0 setproctitle==1.3.8 sniffio==1.3.1 starlette==1.10.0 truststore==0.10.5 typing-inspection==0.4.5 xgrammar==0.2.8
pack "$work/packages" "$out/engine/packages.tar.xz"

fetch "$work/flashmla" sgl-flash-mla==1.0.0
pack "$work/flashmla" "$out/vendors/flashmla.tar.xz"
du -sh "$out"/*
