#!/bin/sh
# Installs the Debian or Ubuntu packages that are missing; does nothing, and needs no network, when all are there.
#
# usage: packages.sh PACKAGE...
set -eu

command -v dpkg-query >/dev/null 2>&1 || {
    echo "This is not Debian or Ubuntu. Please see to it that the equivalent of these is installed: $*" >&2
    exit 0
}

missing=
for package in "$@"; do
    status=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
    [ "$status" = installed ] || missing="$missing $package"
done
[ -n "$missing" ] || exit 0

if [ "$(id -u)" = 0 ]; then
    run=
elif command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
    run=sudo
else
    echo "These packages are missing; please run:" >&2
    echo "  sudo apt-get update && sudo apt-get install -y --no-install-recommends$missing" >&2
    exit 1
fi

echo "Installing:$missing" >&2
# The lists of a fresh machine are empty or stale. An update that fails (one dead mirror) may still leave good lists.
$run env DEBIAN_FRONTEND=noninteractive apt-get update -q || true
# shellcheck disable=SC2086
$run env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $missing
