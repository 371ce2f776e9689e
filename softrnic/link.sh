#!/bin/sh
# Links the software RNIC into a versioned libibverbs.so.1, and its command `softrnic`.
#
# usage: link.sh PROFILE OUTDIR     PROFILE: debug or release
#
# Rust cannot give symbols version nodes, and clients look them up by node (dlvsym). So the crate is built as a static
# library, and one link with the C compiler adds the version map and a stub for every name that is not implemented.
set -eu

profile=${1:?usage: link.sh PROFILE OUTDIR}
out=${2:?usage: link.sh PROFILE OUTDIR}
here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$here")
target=${CARGO_TARGET_DIR:-$root/target}

case $profile in
debug | dev) dir=debug; flags= ;;
release) dir=release; flags=--release ;;
*) echo "link.sh: PROFILE must be debug or release" >&2; exit 2 ;;
esac

if [ -z "${SOFTRNIC_NO_BUILD:-}" ]; then
    # Only the static library: next to an rlib, a release build would leave LTO bitcode in it that cc cannot read.
    # shellcheck disable=SC2086
    (cd "$root" && cargo rustc -q -p softrnic --lib --crate-type staticlib $flags)
fi
archive=$target/$dir/libsoftrnic.a
[ -f "$archive" ] || { echo "link.sh: $archive is missing" >&2; exit 1; }

mkdir -p "$out"
work=$(mktemp -d "$out/.link.XXXXXX")
trap 'rm -rf "$work"' EXIT

nm -g --defined-only "$archive" 2>/dev/null | awk '$2 == "T" { print $3 }' |
    grep -E '^_?(ibv_|mult_to_|mbps_to_|verbs_|softrnic_)' | sort -u >"$work/defined"

awk -v defined="$work/defined" -v map="$work/map" -v stubs="$work/stubs.c" -v wanted="$work/wanted" '
BEGIN {
    while ((getline line < defined) > 0) have[line] = 1
    print "#include <errno.h>\n#pragma GCC visibility push(default)" > stubs
    print "#define STUB(n) long n(void) { errno = EOPNOTSUPP; return 0; }" > stubs
}
/^#/ || NF == 0 { next }
!($1 in seen) { seen[$1] = 1; order[++nodes] = $1 }
NF == 1 { next }
{
    name = $2
    # A name that two private nodes share: the later node gets an alias of its own.
    if (name in first) {
        alias = "p_" ++aliases "_" name
        target = name
        if (name == "verbs_allow_disassociate_destroy")
            print "__attribute__((weak)) char " alias ";" > stubs
        else if (name == "ibv_query_gid_type")
            print "int ibv_query_gid_type(void *, unsigned char, unsigned, unsigned *);\nint " alias \
                "(void *c, unsigned char p, unsigned i, unsigned *t) { return ibv_query_gid_type(c, p, i, t); }" > stubs
        else
            print "STUB(" alias ")" > stubs
        print "__asm__(\".symver " alias "," name "@" $1 "\");" > stubs
        next
    }
    first[name] = 1
    names[$1] = names[$1] "  " name ";\n"
    if (name in have) print name > wanted
    else if (name == "verbs_allow_disassociate_destroy") print "char " name ";" > stubs
    else if (name ~ /^verbs_register_driver_/) print "void " name "(void) {}" > stubs
    else print "STUB(" name ")" > stubs
}
END {
    for (i = 1; i <= nodes; i++) {
        node = order[i]
        printf "%s {%s%s%s}%s;\n", node, names[node] == "" ? "" : " global:\n" names[node], \
            i == 1 ? " local: *;\n" : "", "", (node ~ /^IBVERBS_1\./ && last != "") ? " " last : "" > map
        if (node ~ /^IBVERBS_1\./) last = node
    }
}' "$here/symbols.txt"

[ -s "$work/wanted" ] || { echo "link.sh: $archive defines none of the listed names" >&2; exit 1; }
undefined=$(sed 's/^/-Wl,-u,/' "$work/wanted")
# shellcheck disable=SC2086
${CC:-cc} -shared -fPIC -O2 -w -o "$work/libibverbs.so.1" $undefined "$work/stubs.c" "$archive" \
    -Wl,--version-script="$work/map" -Wl,-soname,libibverbs.so.1 -Wl,--gc-sections -Wl,-z,defs -Wl,-z,now -Wl,-z,relro \
    -lgcc_s -lpthread -ldl -lm -lc

# The command is the same archive with another entry, so that both always agree about what lies where.
cat >"$work/main.c" <<'END'
int softrnic_main(int, char **);
int main(int count, char **words) { return softrnic_main(count, words); }
END
${CC:-cc} -O2 -o "$work/softrnic" "$work/main.c" "$archive" -Wl,--gc-sections -Wl,-z,now -Wl,-z,relro \
    -lgcc_s -lpthread -ldl -lm -lc
mv "$work/libibverbs.so.1" "$out/libibverbs.so.1"
ln -sf libibverbs.so.1 "$out/libibverbs.so"
mv "$work/softrnic" "$out/softrnic"
