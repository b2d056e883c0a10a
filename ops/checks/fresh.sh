#!/usr/bin/env bash
# The README's commands on a machine that has nothing: a fresh clone, an empty HOME, an empty
# environment.
#
#   ops/checks/fresh.sh [--torch BUILD] [--torch-index WHERE] [--commands "demo test"]
#                       [--folder DIR] [--keep]
#
#   --torch        cpu, or an exact version (make TORCH=...); without it, whichever build pip takes
#   --torch-index  its index's URL, or a folder of wheels (make TORCH_INDEX=...)
#   --commands     which of the README's commands; with "" the installation alone is made and
#                  measured
#   --folder       where it is made (a new folder under TMPDIR); the CUDA build needs 6 GB there,
#                  and as much again where pip keeps a cache
#   --keep         leave the folder, also after success; a failure always leaves it
#
# Prints a table of seconds and sizes. Exit code 1 when a command failed; the table names it.
set -euo pipefail

torch="" torch_index="" commands="demo test" folder="" keep=""
while [ $# -gt 0 ]; do
  case "$1" in
    --torch) torch="$2"; shift 2 ;;
    --torch-index) torch_index="$2"; shift 2 ;;
    --commands) commands="$2"; shift 2 ;;
    --folder) folder="$2"; shift 2 ;;
    --keep) keep=yes; shift ;;
    *) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
  esac
done
repository="$(cd "$(dirname "$0")/../.." && pwd)"
if [ -z "$folder" ]; then
  folder="$(mktemp -d "${TMPDIR:-/tmp}/headrace-fresh-XXXXXX")"
elif [ -e "$folder" ]; then
  echo "fresh.sh: $folder is there already: a fresh machine needs a new folder" >&2
  exit 2
fi
mkdir -p "$folder/home"
if [ -n "$(git -C "$repository" status --porcelain)" ]; then
  echo "fresh.sh: what is not committed is not in the clone" >&2
fi
git clone --quiet "$repository" "$folder/headrace"
cd "$folder/headrace"

# PATH finds python3 and make; everything else that a login would bring is absent.
fresh() { env -i PATH="$PATH" LANG=C.UTF-8 HOME="$folder/home" "$@"; }
size() { if [ -e "$1" ]; then du --summarize --block-size=M --apparent-size "$1" | cut -f1; else echo -; fi; }

table="" failed=""
measure() { # NAME COMMAND...
  local name="$1" started seconds result=ok
  shift
  echo "== $*"
  started=$(date +%s)
  fresh "$@" || result="failed ($?)"
  seconds=$(($(date +%s) - started))
  [ "$result" = ok ] || failed=yes
  table+="$(printf '%-16s %6s s   %-12s .venv %s, HOME %s' "$name" "$seconds" "$result" "$(size .venv)" "$(size "$folder/home")")"$'\n'
}

measure "install" make .venv/.run TORCH="$torch" TORCH_INDEX="$torch_index"
for command in $commands; do
  [ -z "$failed" ] || break
  measure "make $command" make "$command" TORCH="$torch" TORCH_INDEX="$torch_index"
done

echo
echo "$(fresh python3 --version), torch $(fresh .venv/bin/python -c 'import torch; print(torch.__version__)' || echo none), $(nproc --all) processors"
printf '%s' "$table"
if [ -n "$failed" ] || [ -n "$keep" ]; then
  echo "left: $folder"
else
  rm -rf "$folder"
fi
[ -z "$failed" ]
