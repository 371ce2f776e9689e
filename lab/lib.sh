# shellcheck shell=bash
# Shared by the lab's host scripts: where things are, how a failure is said, how packages are fetched.

# shellcheck disable=SC2034  # for the scripts that read this file
{
    lab=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
    repo=$(dirname "$lab")
    out=${LAB_OUT:-$lab/out}
    tools=$out/tools
    libs=$tools/usr/lib/x86_64-linux-gnu
}

say() { echo "lab: $*" >&2; }

# 125 is the lab's own failure, as with env(1) and timeout(1); any other code is the guest command's.
die() {
    say "$*"
    exit 125
}

# first PATH...: the first one that exists
first() {
    local f
    for f; do
        if [ -e "$f" ]; then
            echo "$f"
            return
        fi
    done
    return 1
}

# tool NAME: a program from the host if it has it, else from the packages that `lab/build` unpacked
tool() {
    command -v "$1" || first "$tools/usr/bin/$1" "$tools/usr/sbin/$1" || die "no $1: run lab/build"
}

# hash FILE...: one key for the contents of some files
hash() { cat "$@" | sha256sum | cut -c1-16; }

# ---- apt, without touching the host's packages -------------------------------------------------------------
# Each NAME is a private apt (its own sources, lists and archives under lab/out); of the host's package state
# only the list of what is installed is read, so that packages the host already has are not fetched again.

keyring=/usr/share/keyrings/debian-archive-keyring.gpg

# mirror PATTERN DEFAULT: the archive from which the host itself gets the suite PATTERN
mirror() {
    local uri
    # shellcheck disable=SC2016  # $(REPO_URI) is apt's, not the shell's
    uri=$(apt-get indextargets --format '$(REPO_URI) $(RELEASE)' 'Identifier: Packages' 2>/dev/null |
        awk -v r="$1" '$2 == r && !u { u = $1 } END { print u }')
    echo "${uri:-$2}"
}

# apt_init NAME "URI SUITE"...: make the private apt and refresh its lists when they are older than an hour
apt_init() {
    local d=$out/apt/$1 line
    shift
    mkdir -p "$d/lists/partial" "$d/archives/partial"
    for line; do echo "deb [arch=amd64 signed-by=$keyring] $line main"; done >"$d/sources"
    cat >"$d/conf" <<END
Dir::Etc::sourceparts "/dev/null";
Dir::Etc::sourcelist "$d/sources";
Dir::State::lists "$d/lists";
Dir::Cache "$d";
Debug::NoLocking "1";
APT::Sandbox::User "root";
APT::Install-Recommends "0";
Acquire::Languages "none";
Acquire::Retries "3";
END
    if [ -z "$(find "$d/updated" -mmin -60 2>/dev/null)" ] || ! cmp -s "$d/sources" "$d/sources.used"; then
        apt_in "${d##*/}" apt-get -qq --error-on=any update ||
            die "cannot fetch the package lists of ${*}: is the mirror reachable? (LAB_MIRROR and LAB_SECURITY_MIRROR name others)"
        cp "$d/sources" "$d/sources.used"
        touch "$d/updated"
    fi
}

# apt_in NAME COMMAND...: run an apt program with that private apt
apt_in() {
    local conf=$out/apt/$1/conf
    shift
    APT_CONFIG=$conf "$@"
}

# unpack DIR DEB...: contents of packages, with /bin, /sbin and /lib folded into /usr as on the installed system
unpack() {
    local dir=$1 deb
    shift
    mkdir -p "$dir"
    for deb; do
        dpkg-deb --fsys-tarfile "$deb" | tar -x -C "$dir" --no-same-owner \
            --transform='flags=r;s,^\./\(bin\|sbin\|lib\|lib64\)/,./usr/\1/,' \
            --exclude=./usr/share/doc --exclude=./usr/share/man --exclude=./usr/share/locale || die "cannot unpack $deb"
    done
    rmdir "$dir"/{bin,sbin,lib,lib64} 2>/dev/null || true
}

# compile NAME SOURCE [FLAG...]: a C program for the guest, lab/out/bin/NAME, against the distribution's libibverbs. Of
# several sources the others are among the flags.
compile() {
    local name=$1 source=$2 cc=${CC:-cc}
    shift 2
    command -v "$cc" >/dev/null || die "no C compiler: apt-get install gcc libc6-dev"
    mkdir -p "$out/bin"
    [ -z "$(find "$source" "$lab"/src/*.[ch] "$lab/lib.sh" -newer "$out/bin/$name" 2>&1)" ] && return
    "$cc" -std=gnu11 -O2 -g -Wall -Wextra -Werror -I"$tools/usr/include" -L"$libs" -o "$out/bin/$name.new" "$source" "$@" ||
        die "cannot compile $source"
    mv "$out/bin/$name.new" "$out/bin/$name"
}

# compile_cases NAME SOURCE INCLUDED [FLAG...]: one more program of ffi-tests with cases of the lab's own, NAME below
# lab/out/bin. SOURCE includes ffi-tests/INCLUDED and is linked with what all of ffi-tests share.
compile_cases() {
    local name=$1 source=$2 included=$repo/ffi-tests/$3 file
    shift 3
    local objects
    read -ra objects <<<"$(sed -n 's/^FFI_SHARED := //p' "$repo/ffi-tests/ffi.mk")"
    [ ${#objects[@]} -gt 0 ] || die "ffi-tests/ffi.mk has no line FFI_SHARED := OBJECT..."
    objects=("${objects[@]/#/$repo/target/ffi-tests/}")
    objects=("${objects[@]/%/.o}")
    [ -d "$repo/target/ffi-tests" ] || die "no $repo/target/ffi-tests: run make -f ffi-tests/ffi.mk"
    mkdir -p "$(dirname "$out/bin/$name")"
    for file in "${objects[@]}" "$included"; do
        [ "$out/bin/$name" -nt "$file" ] || rm -f "$out/bin/$name"
    done
    compile "$name" "$source" -D_GNU_SOURCE -I"$repo/ffi-tests" "${objects[@]}" -pthread -ldl "$@"
}
