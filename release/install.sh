#!/bin/sh
# Puts the files of a release below $DESTDIR$PREFIX and takes exactly those away again.
#
# usage: install.sh install|uninstall     PREFIX: /usr/local, DESTDIR: nothing
#
# What was made is written down in $PREFIX/lib/pinrail/installed: `d` for folders that were not there before, `f` for files,
# in the order in which they were made.
set -eu

prefix=${PREFIX:-/usr/local}
case $prefix in /*) ;; *) echo "install.sh: PREFIX must begin with a slash, and is $prefix" >&2; exit 2 ;; esac
top=${DESTDIR:-}$prefix
record=$top/lib/pinrail/installed

# One by one, and folders only while nothing else is in them.
remove() {
    [ -f "$record" ] || { echo "install.sh: nothing of pinrail is installed below $top" >&2; exit 1; }
    list=$(mktemp)
    sed '1!G;h;$!d' "$record" >"$list"
    rm -f "$record"
    while read -r kind path; do
        case $kind in
        f) rm -f "$top/$path" ;;
        d) rmdir "$top/$path" 2>/dev/null || : ;;
        esac
    done <"$list"
    # Folders above PREFIX, which a package's DESTDIR does not have before.
    while read -r kind path; do
        [ "$kind" = D ] && rmdir "${DESTDIR:-}$path" 2>/dev/null || :
    done <"$list"
    rm -f "$list"
}

folder() {
    [ -d "$top/$1" ] && return
    case $1 in */*) folder "${1%/*}" ;; esac
    mkdir "$top/$1"
    made="$made
d $1"
}

case ${1:-} in
install)
    cd "$(dirname "$0")"
    [ -f files ] || { echo "install.sh: the list of files is missing; unpack the release anew" >&2; exit 1; }
    # Nobody else's file is written over.
    while read -r mode path; do
        if [ -e "$top/$path" ] && ! grep -qxF "f $path" "$record" 2>/dev/null; then
            echo "install.sh: $top/$path is there, and was not installed by this; move it away or choose another PREFIX" >&2
            exit 1
        fi
    done <files
    [ -f "$record" ] && remove
    # Folders above are ours too if they were not there.
    made=
    above=$prefix
    missing=
    while [ -n "$above" ] && [ ! -d "${DESTDIR:-}$above" ]; do
        missing="D $above
$missing"
        above=${above%/*}
    done
    mkdir -p "$top"
    made=$(printf '%s' "$missing" | sed '/^$/d')
    folder lib
    folder lib/pinrail
    while read -r mode path; do
        folder "${path%/*}"
        install -m "$mode" "$path" "$top/$path"
        made="$made
f $path"
    done <files
    install -m 755 install.sh "$top/lib/pinrail/install.sh"
    made="$made
f lib/pinrail/install.sh"
    printf '%s\n' "$made" | sed '/^$/d' >"$record"
    echo "installed below $top; NCCL finds the plugin with LD_LIBRARY_PATH=$prefix/lib and NCCL_NET_PLUGIN=pinrail"
    ;;
uninstall)
    remove
    echo "removed what was installed below $top"
    ;;
*)
    echo "usage: install.sh install|uninstall" >&2
    exit 2
    ;;
esac
