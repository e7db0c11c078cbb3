#!/bin/sh
# From a bare Debian to one that runs every test: installs what some tests start and pip cannot bring.
#
# Takes nothing; needs apt-get, and root or a sudo that asks for no password. Where it may not install, it says in one
# line which tests will be skipped. It never fails a set-up: its exit code is 0 either way.
#
#   slurmctld slurmd slurm-client munge   batch jobs on a Slurm of this machine (tests/helpers/slurm.py)
#   chromium                              the report in a real browser

set -u
PROGRAMS="slurmctld slurmd sbatch munged chromium"
export PATH="$PATH:/usr/sbin:/sbin"

package_of() {
    case "$1" in
        sbatch) echo slurm-client ;;
        munged) echo munge ;;
        *) echo "$1" ;;
    esac
}

missing() {
    for program in $PROGRAMS; do
        command -v "$program" >/dev/null 2>&1 || package_of "$program"
    done
}

skipped() {
    echo "system packages: $1: tests that need$(missing | tr '\n' ' ' | sed 's/^/ /; s/ $//') are skipped"
    exit 0
}

[ -n "$(missing)" ] || exit 0

command -v apt-get >/dev/null 2>&1 || skipped "no apt-get here"
if [ "$(id -u)" -eq 0 ]; then
    as_root="env"
elif sudo -n true >/dev/null 2>&1; then
    as_root="sudo -n env"
else
    skipped "neither root nor a sudo without password"
fi

# Lists may be old, a mirror may be busy, another apt may be at work: tried three times, a little later each time.
log=$(mktemp)
trap 'rm -f "$log"' EXIT
for pause in 0 5 15; do
    sleep "$pause"
    $as_root apt-get update -qq -o DPkg::Lock::Timeout=120 >"$log" 2>&1 || continue
    # One by one: a package that this release lacks must not keep the others out. RUNLEVEL=1: install, start nothing.
    for package in $(missing); do
        $as_root DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -qq -y --no-install-recommends \
            -o DPkg::Lock::Timeout=120 "$package" >"$log" 2>&1
    done
    [ -n "$(missing)" ] || exit 0
done
skipped "apt-get failed ($(grep -m 1 '^E:' "$log" || echo 'it did not say why'))"
