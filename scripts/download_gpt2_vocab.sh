#!/usr/bin/env bash
# Download GPT-2's vocabulary (encoder.json) and merges (vocab.bpe) from OpenAI, and check them by sha256.
#
#   bash scripts/download_gpt2_vocab.sh [FOLDER]
#
# The default FOLDER is the user's cache, which training searches. For a different one, train with --cache-dir FOLDER.
# Files with the right sha256 are kept. GPT2_VOCAB_URL is an alternative address. The exit code of a failure is 2.
set -euo pipefail

url=${GPT2_VOCAB_URL:-https://openaipublic.blob.core.windows.net/gpt-2/models/117M}
cache=${XDG_CACHE_HOME:-${HOME:+$HOME/.cache}}

fail() { echo "error: $*" >&2; exit 2; }

[ $# -gt 0 ] || [ -n "$cache" ] || fail "there is no home folder: name a FOLDER, and train with --cache-dir FOLDER"
folder=${1:-$cache/gpt2-model-parallel}

sha256() {
    if command -v sha256sum >/dev/null; then sha256sum "$1"; else shasum -a 256 "$1"; fi | cut -d ' ' -f 1
}

fetch() {  # URL FILE
    if command -v curl >/dev/null; then
        curl --fail --silent --show-error --location --retry 2 --connect-timeout 20 --output "$2" "$1"
    elif command -v wget >/dev/null; then
        wget --quiet --tries=3 --timeout=20 --output-document="$2" "$1"
    else
        fail "neither curl nor wget is installed"
    fi
}

get() {  # NAME SHA256
    local target=$folder/$1
    if [ -f "$target" ] && [ "$(sha256 "$target")" = "$2" ]; then
        echo "$target is there"
        return
    fi
    temporary=$(mktemp "$folder/.$1.XXXXXX") || fail "$folder cannot be written: name another folder"
    trap 'rm -f "$temporary"' EXIT
    fetch "$url/$1" "$temporary" ||
        fail "$url/$1 cannot be downloaded: where this machine has no network, put encoder.json and vocab.bpe into $folder"
    [ "$(sha256 "$temporary")" = "$2" ] || fail "$url/$1 is not the file expected (its sha256 differs)"
    chmod 644 "$temporary"
    mv "$temporary" "$target"  # a reader never sees a partial file
    echo "$target downloaded"
}

mkdir -p "$folder" || fail "$folder cannot be made: name another folder"
get encoder.json 196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783
get vocab.bpe 1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5
