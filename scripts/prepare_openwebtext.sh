#!/usr/bin/env bash
# Make a training corpus from web text, with all steps of tools/openwebtext:
#
#   bash scripts/prepare_openwebtext.sh --urls FILES --output FOLDER [flags]     addresses, one per line
#   bash scripts/prepare_openwebtext.sh --texts FILES --output FOLDER [flags]    your own text: JSON lines or .txt
#
#   --evaluation FILES  drop documents that share 13 consecutive words with these; may be repeated
#   --limit N           only the first N addresses or texts
#   --workers N         processes (default: the processors)
#
# FILES is a file, a folder or a glob in quotes. Environment variables give flags to single steps: URLS_FLAGS,
# DOWNLOAD_FLAGS, CLEANUP_FLAGS, DUPLICATES_FLAGS, EVALUATION_FLAGS, SPLIT_FLAGS. If the script is killed, run the same
# command again to continue. The exit code of a failure is 2.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

fail() { log "error: $*"; exit 2; }

urls="" texts="" output="" limit=() workers=() evaluation=()
while [ $# -gt 0 ]; do
    if [ "$1" = --help ]; then sed -n '2,/^set/{/^#/s/^# \{0,1\}//p;}' "$0"; exit; fi
    [ $# -ge 2 ] || fail "$1 needs a value, or is unknown: see --help"
    case $1 in
        --urls) urls=$2 ;;
        --texts) texts=$2 ;;
        --output) output=$2 ;;
        --limit) limit=(--limit "$2") ;;
        --workers) workers=(--workers "$2") ;;
        --evaluation) evaluation+=("$2") ;;
        *) fail "$1 is unknown: see --help" ;;
    esac
    shift 2
done
[ -n "$output" ] || fail "--output is missing: name the folder to write"
if [ -z "$urls$texts" ] || { [ -n "$urls" ] && [ -n "$texts" ]; }; then
    fail "give either --urls or --texts: see --help"
fi

find_python ""

step() {  # NAME ARGUMENTS...: runs one step, with the flags for all steps
    local name=$1
    shift
    "$PYTHON" "$ROOT/tools/openwebtext/$name.py" "$@" ${workers[@]+"${workers[@]}"}
}

# The flags of a step are a list of words, so they are unquoted. The + is for Bash before 4.4, without empty lists.
if [ -n "$urls" ]; then
    step blacklist_urls "$urls" "$output/1-urls" ${limit[@]+"${limit[@]}"} ${URLS_FLAGS:-}
    step download_urls "$output/1-urls" "$output/2-pages" ${DOWNLOAD_FLAGS:-}
    texts=$output/2-pages limit=()
fi
step cleanup_dataset "$texts" "$output/3-clean" ${limit[@]+"${limit[@]}"} ${CLEANUP_FLAGS:-}
step find_duplicates "$output/3-clean" "$output/4-duplicates" ${DUPLICATES_FLAGS:-}
step group_duplicate_url "$output/4-duplicates/pairs.jsonl" "$output/5-groups"
step remove_group_duplicates "$output/5-groups/groups.jsonl" "$output/3-clean" "$output/6-unique"
last=$output/6-unique
if [ ${#evaluation[@]} -gt 0 ]; then
    step filter_ngrams "$last" "$output/7-decontaminated" --evaluation "${evaluation[@]}" ${EVALUATION_FLAGS:-}
    last=$output/7-decontaminated
else
    log "notice: without --evaluation, documents that are in an evaluation set are not dropped"
fi
step merge_jsons --data_path "$last" --output_file "$output/8-merged/corpus.jsonl"
step split_dataset "$output/8-merged/corpus.jsonl" "$output/9-split" ${SPLIT_FLAGS:-}
