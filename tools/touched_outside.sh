#!/bin/sh
# What a command leaves outside of a folder: run as a user without rights, then a look at everything that is new.
#
# Takes the folder, in which the command is run, and the command. Needs root, to become the user nobody, whose the folder
# is then. Its HOME is a folder beside it. Prints every file and folder that nobody owns elsewhere, or may write and that
# changed meanwhile; exit code 1 if there is one, else the command's.
#
#   git clone . /tmp/fresh/megatile && tools/touched_outside.sh /tmp/fresh/megatile make demo

set -u
folder=$(realpath "$1")
shift
home=$(dirname "$folder")/home
mkdir -p "$home"
# Not what has a second name elsewhere: the owner would change there, too.
find "$folder" "$home" \( -type d -o -links 1 \) -exec chown --no-dereference nobody {} +
marker=$home/.marker
touch "$marker"
trap 'rm -f "$marker" "$marker.found"' EXIT

(cd "$folder" && exec setpriv --reuid=nobody --regid=nogroup --clear-groups --no-new-privs \
    env -i PATH="$PATH" HOME="$home" LANG=C.UTF-8 "$@")
code=$?

[ -f "$marker" ] || { echo "the command removed $marker: nothing can be said"; exit 2; }
# File systems of their own, each to be looked at: find stays on the one that it is given.
find / /tmp /var/tmp /run /dev/shm -xdev \( -path "$folder" -o -path "$home" -o -path /proc \) -prune -o \
    -cnewer "$marker" \( -user nobody -o -type f -perm -0002 \) -print 2>/dev/null | sort -u >"$marker.found"
if [ -s "$marker.found" ]; then
    echo "touched outside of $folder and $home:"
    cat "$marker.found"
    exit 1
fi
echo "nothing touched outside of $folder and $home (exit code of the command: $code)"
exit "$code"
