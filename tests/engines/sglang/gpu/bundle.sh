#!/usr/bin/env bash
# Packs what SGLang 0.5.23 needs beside torch 2.11+cu130, Triton 3.6 and nvcc 13 (Python 3.12, Linux, Hopper, no network):
#   bundle.sh FOLDER     writes FOLDER/engine (31 MiB), FOLDER/flashinfer (25, with FlashMLA), FOLDER/fa3 (20): a few minutes
# sglang-kernel is 0.4.5 for the pinned 0.4.10, which is built for torch 2.14: its c10::TensorImpl is 8 bytes shorter, so that
# every inlined accessor reads the wrong field. 0.4.5 is built for torch 2.11 and has all operators that are called here. Its
# FlashAttention-3 (1.1 GB) stays behind.
set -euo pipefail
out=${1:?usage: bundle.sh FOLDER}
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out/engine" "$out/flashinfer" "$out/fa3"

fetch() {  # FOLDER PACKAGE==VERSION ...: wheels for the GPU machine, without what they depend on, unpacked
  local site=$1 wheels platforms=()
  shift
  wheels=$(mktemp -d -p "$work")
  for tag in 2_34 2_28 2_27 2_24 2_17 2_5 1; do platforms+=(--platform "manylinux_${tag}_x86_64"); done
  "$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    --abi cp312 --abi abi3 --abi none "${platforms[@]}" --platform manylinux1_x86_64 --platform manylinux2014_x86_64 \
    --platform any --dest "$wheels" "$@"
  for wheel in "$wheels"/*.whl; do "$python" -m zipfile -e "$wheel" "$site"; done
}
pack() {  # FOLDER ARCHIVE
  find "$1" -name __pycache__ -prune -exec rm -rf {} +
  find "$1" -name '*.so' -size -100M -exec strip --strip-unneeded {} + 2> /dev/null || true
  tar -C "$1" -cf - . | xz -T0 -6 > "$2"
}

fetch "$work/sglang" sglang==0.5.23
find "$work/sglang/sglang/test" -mindepth 1 -maxdepth 1 ! -name '*.py' ! -name kits ! -name kernels -exec rm -rf {} +
# `plans` and the suite's drivers run on its kits, which import its kernels
rm -rf "$work"/sglang/sglang/{multimodal_gen,benchmark} "$work"/sglang/sglang/srt/rust_extensions/_*.so \
  "$work"/sglang/sglang/srt/mem_cache/rust_tree_core/*.so
pack "$work/sglang" "$out/engine/sglang.tar.xz"

fetch "$work/kernels" sglang-kernel==0.4.5
find "$work/kernels" -name '*.so' ! -path '*/sm90/common_ops*' -delete
pack "$work/kernels" "$out/engine/kernels.tar.xz"

fetch "$work/packages" annotated-doc==0.0.7 annotated-types==0.8.0 apache-tvm-ffi==0.1.11 compressed-tensors==0.18.0 dill==0.4.1 \
  distro==1.9.0 fastapi==0.165.0 gguf==0.19.0 httpcore2==2.16.2 httpx2==2.16.2 interegular==0.3.3 jiter==0.19.0 loguru==0.7.3 \
  msgspec==0.22.0 openai==2.8.0 opentelemetry-api==1.45.2 orjson==3.13.0 partial-json-parser==0.2.1.1.post7 pybase64==1.5.1 \
  pydantic==2.14.3 pydantic_core==2.50.4 python-multipart==0.0.34 pyzmq==27.3.0 setproctitle==1.3.8 sniffio==1.3.1 \
  starlette==1.10.0 transformers==5.19.0 truststore==0.10.5 typing_extensions==4.16.0 typing-inspection==0.4.5 uvicorn==0.54.0 \
  watchfiles==1.3.0 xgrammar==0.2.7 zstandard==0.25.0
pack "$work/packages" "$out/engine/packages.tar.xz"

fetch "$work/vendors" flashinfer-python==0.7.2.post1 sgl-flash-mla==1.0.0
find "$work/vendors/flashinfer/experimental" -type f ! -name '*.py' -delete  # it unpacks to 430 MiB; attention is a third
find "$work/vendors/flashinfer/data/csrc" -mindepth 1 -maxdepth 1 -type d ! -name nv_internal ! -name fmha_v2 -exec rm -rf {} +
find "$work/vendors/flashinfer/data/csrc" -maxdepth 1 -type f -size +100k -delete
pack "$work/vendors" "$out/flashinfer/vendors.tar.xz"

fetch "$work/vllm" vllm==0.33.0
mkdir -p "$work/fa3/vllm"
cp -r "$work/vllm/vllm/vllm_flash_attn" "$work/fa3/vllm/"
find "$work/fa3" -type f ! -name __init__.py ! -name flash_attn_interface.py ! -name '_vllm_fa3_C*' -delete
touch "$work/fa3/vllm/__init__.py"
mkdir "$work/fa3/vllm-0.33.0.dist-info" && cp "$work"/vllm/vllm-0.33.0.dist-info/METADATA "$work/fa3/vllm-0.33.0.dist-info/"
pack "$work/fa3" "$out/fa3/fa3.tar.xz"
du -sh "$out"/*
