#!/bin/sh
# What some tests start and pip cannot bring: `make setup-all`, and nothing else, runs this.
#
# Takes nothing; needs apt-get, and root or a sudo that asks for no password. Says first what it installs, at the end
# what it leaves on the system and how to remove that: packages, whose services are neither started nor left enabled.
# Where it may not install, it says in one line which tests will be skipped. Its exit code is 0 either way.
#
#   slurmctld slurmd slurm-client munge   batch jobs on a Slurm of this machine (tests/helpers/slurm.py)
#   chromium                              the report in a real browser

set -u
PROGRAMS="slurmctld slurmd sbatch munged chromium"
SERVICES="munge slurmctld slurmd"
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

list() {
    echo "$@" | tr '\n' ' ' | sed 's/ *$//'
}

# Debian enables what it installs. Tests start daemons of their own, as the user who runs them.
switch_off_services() {
    for service in $SERVICES; do
        case " $wanted " in
            *" $service "*) $as_root update-rc.d "$service" disable >"$log" 2>&1 ;;
        esac
    done
}

skipped() {
    echo "system packages: $1: tests that need $(list "$(missing)") are skipped"
    exit 0
}

wanted=$(list "$(missing)")
if [ -z "$wanted" ]; then
    echo "system packages: nothing to install"
    exit 0
fi

command -v apt-get >/dev/null 2>&1 || skipped "no apt-get here"
if [ "$(id -u)" -eq 0 ]; then
    as_root="env"
elif sudo -n true >/dev/null 2>&1; then
    as_root="sudo -n env"
else
    skipped "neither root nor a sudo without password"
fi
echo "system packages: installing $wanted with apt-get, as root"

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
    [ -n "$(missing)" ] || break
done
fault=$(grep -m 1 '^E:' "$log" || echo 'it did not say why')
switch_off_services
echo "system packages: left installed: those of $wanted that were there to install, none of their services enabled or" \
    "started; to remove them: apt-get purge --auto-remove $wanted"
[ -z "$(missing)" ] || skipped "apt-get failed ($fault)"
