# shellcheck shell=bash
# Shared by the guest's lists of checks: each check has a limit of its own, its output is shown when it fails
# (or with LAB_VERBOSE=1), and a list passes only if something ran and nothing failed.

passed=0
failed=()
log=$(mktemp)

# try LIMIT NAME COMMAND [ARG...]: one check, ended after LIMIT seconds
try() {
    local limit=$1 name=$2 code=0 begin=$EPOCHREALTIME
    shift 2
    timeout -k 5 "$limit" "$@" >"$log" 2>&1 </dev/null || code=$?
    local took
    took=$(awk "BEGIN { printf \"%.1f\", $EPOCHREALTIME - $begin }")
    if [ "$code" = 0 ]; then
        passed=$((passed + 1))
        printf 'ok    %-52s %6s s\n' "$name" "$took"
        [ -z "${LAB_VERBOSE-}" ] || sed 's/^/      | /' "$log"
        return
    fi
    failed+=("$name")
    [ "$code" != 124 ] || code="124 (limit $limit s)"
    printf 'FAIL  %-52s %6s s  exit %s\n' "$name" "$took" "$code"
    sed 's/^/      | /' "$log"
    counters | sed 's/^/      | /'
}

# counters: what rxe counted besides plain traffic; retransmissions explain a slow check
counters() {
    local file
    for file in /sys/class/infiniband/*/ports/1/hw_counters/*; do
        case ${file##*/} in lifespan | link_downed | *_pkts | *_bytes | rdma_sends | rdma_recvs | ack_deferred) continue ;; esac
        [ "$(cat "$file")" = 0 ] || echo "${file#/sys/class/infiniband/}: $(cat "$file")" | sed 's,/ports/1/hw_counters/, ,'
    done
}

# finish LIST: the verdict on the list, as the exit code
finish() {
    local trouble
    trouble=$(dmesg | grep -E 'BUG:|WARNING:|Oops|general protection|soft lockup|rcu.*stall' || true)
    counters
    if [ -n "$trouble" ]; then
        failed+=(kernel)
        echo "the kernel complained:"
        echo "$trouble"
    fi
    echo "$1 on $(uname -r): $passed passed, ${#failed[@]} failed"
    [ ${#failed[@]} -eq 0 ] || printf '  failed: %s\n' "${failed[@]}"
    [ "$passed" -gt 0 ] && [ ${#failed[@]} -eq 0 ]
}

# movable_frames: page frames in which a long-term pin is forbidden, "FIRST END cma" or "FIRST END zone"; nothing if the
# boot log names no CMA reserve and there is no ZONE_MOVABLE
movable_frames() {
    local mib address
    read -r mib address < <(dmesg | sed -n 's/.*cma: Reserved \([0-9]*\) MiB at 0x\([0-9a-f]*\).*/\1 0x\2/p') || true
    if [ -n "${address-}" ]; then
        echo "$((address / 4096)) $((address / 4096 + mib * 256)) cma"
    else
        awk '/^Node/ { zone = $4 } zone != "Movable" { next } $1 == "spanned" { n = $2 }
             $1 == "start_pfn:" && n { print $2, $2 + n, "zone" }' /proc/zoneinfo
    fi
}
