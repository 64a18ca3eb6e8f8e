#!/bin/sh
# Compiler launcher: runs nvcc and keeps what ptxas says beside the object, as <object>.ptxas, for
# tools/kernel_report.py. Only warnings and errors are shown.
output=
previous=
for argument in "$@"; do
  if [ "$previous" = "-o" ]; then
    output=$argument
  fi
  previous=$argument
done
if [ -z "$output" ]; then
  exec "$@"
fi
"$@" >"$output.ptxas" 2>&1
status=$?
if [ $status -ne 0 ]; then
  cat "$output.ptxas" >&2
else
  grep -v -E '^ptxas info|^ +[0-9]+ bytes stack frame|^$' "$output.ptxas" >&2
fi
exit $status
