#!/bin/sh
# House rules a compiler does not check: banned functions, typedef struct; cppcheck where it is installed.
# Warnings are errors when CI=true (the Makefile's WARN).
set -u
cd "$(dirname "$0")/.." || exit 1
bad=0
files=$(git ls-files '*.c' '*.h' '*.cc' '*.cu' '*.cuh' '*.inc')

# Functions without a bound or without an error.
banned='\b(sprintf|vsprintf|strcpy|strcat|strncpy|strtok|atoi|atol|atof|sscanf|gets|system|tmpnam)[[:space:]]*\('
# shellcheck disable=SC2086
if grep -nE "$banned" $files; then
    echo "lint: banned functions (above)" >&2
    bad=1
fi
# shellcheck disable=SC2086
if grep -nE '^typedef struct' $files; then
    echo "lint: no typedef struct (above)" >&2
    bad=1
fi
if command -v cppcheck >/dev/null 2>&1; then
    # shellcheck disable=SC2086
    cppcheck --quiet --std=c11 --enable=warning,portability --inline-suppr --error-exitcode=1 \
        --suppress=missingIncludeSystem -I. $(git ls-files '*.c' | grep -v '^tests/') || bad=1
fi
exit $bad
