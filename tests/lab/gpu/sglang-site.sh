#!/bin/sh
# Makes FOLDER/site.tar.xz (30 MB): a real SGLang 0.5.16 for CPython 3.12 and Hopper, cut down to what a start with dummy
# weights, the triton backend and speculation imports. It is unpacked to /opt/sglang-site on the machine with the GPU,
# whose image has PyTorch, triton, transformers and nvcc; missing kernels are compiled there at the first start.
# usage: sglang-site.sh FOLDER    (from a checkout after `make setup`; takes two minutes and 2 GB below FOLDER)
set -eu
folder=$1
here=$(cd "$(dirname "$0")" && pwd)
python="$here/../../../.venv/bin/python"
mkdir -p "$folder/whl" && cd "$folder"
platforms=$(for n in 2_34 2_31 2_28 2_27 2_26 2_17 2_12 2_5; do echo "--platform manylinux_${n}_x86_64"; done)
# shellcheck disable=SC2086
"$python" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp $platforms \
    --platform manylinux2014_x86_64 --platform manylinux1_x86_64 -d whl -r "$here/sglang-site.txt"

rm -rf site && mkdir site
for wheel in whl/*.whl; do
    case $wheel in
        # Of 1.2 GB of kernels, those for Hopper that the triton backend calls.
        *sglang_kernel*) unzip -qo "$wheel" -d site -x '*/sm100/*' '*/flash_ops*' '*/flashmla_ops*' '*/infllm_ops*' ;;
        # norm is compiled from these sources at the first start; the rest is not called.
        *flashinfer*) unzip -qo "$wheel" -d site -x '*/data/cutlass/*' '*/data/cccl/*' ;;
        *) unzip -qo "$wheel" -d site ;;
    esac
done
rm -rf site/jedi/third_party site/deep_gemm/include site/xgrammar/include
rm -f site/sglang/srt/grpc/_core.*.so site/sglang/srt/multimodal/_core.*.so
find site -name '*.a' -delete
find site/xgrammar site/tvm_ffi -name '*.so' -exec strip --strip-unneeded {} +
cp "$here/sglang_sitecustomize.py" site/sitecustomize.py
tar -C site -c . | xz -T0 -6 >site.tar.xz
ls -l site.tar.xz
