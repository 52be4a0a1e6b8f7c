#!/usr/bin/env bash
# The steps of the Dockerfile without a container runtime: an image as a folder, and a container from it by namespaces.
#   sudo deploy/docker/clean_root.sh build ROOT [APP]           # a clean Debian in ROOT, with Lamina from its wheel and an app in /app
#   sudo deploy/docker/clean_root.sh run ROOT serve app.py ...  # as PID 1 and user 10001, on a read-only root
# Needed: root, debootstrap, and a way to Debian's and Python's packages. Exit status 77: it cannot be done here.
set -euo pipefail
repository=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}
extras=${EXTRAS:-}
suite=${SUITE:-bookworm}
mirror=${MIRROR:-http://deb.debian.org/debian}
user=10001

cannot() {
    echo "cannot be done here: $1" >&2
    exit 77
}

build() {
    local root=$1 app=${2:-$repository/examples/ocr} wheels
    [ "$(id -u)" = 0 ] || cannot "it needs root"
    command -v debootstrap >/dev/null || cannot "no debootstrap"
    [ ! -e "$root/opt/lamina" ] || { echo "$root has been built" >&2; return 0; }
    mkdir -p "$root"
    debootstrap --variant=minbase --include=python3,python3-venv "$suite" "$root" "$mirror" >"$root.log" 2>&1 \
        || cannot "debootstrap failed: $(tail -n 1 "$root.log")"
    # the wheel, and those it needs, for the Python of the new root
    wheels=$root/wheels
    mkdir -p "$wheels"
    "$python" -m pip wheel --quiet --no-deps --wheel-dir "$wheels" "$repository" >>"$root.log" 2>&1 || cannot "no wheel: $(tail -n 1 "$root.log")"
    local version
    version=$(chroot "$root" python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    "$python" -m pip download --quiet --dest "$wheels" --only-binary :all: --python-version "$version" \
        "$(ls "$wheels"/lamina-*.whl)${extras:+[$extras]}" >>"$root.log" 2>&1 || cannot "no packages: $(tail -n 1 "$root.log")"
    # from here on as in the Dockerfile
    chroot "$root" python3 -m venv /opt/lamina
    chroot "$root" env -i PATH=/usr/bin:/bin /opt/lamina/bin/pip install --quiet --no-cache-dir --no-index --find-links /wheels "lamina${extras:+[$extras]}"
    rm -rf "$wheels"
    cp -r "$app" "$root/app"
    chroot "$root" useradd --uid $user --home-dir /var/lib/lamina --create-home lamina
}

run() {
    local root=$1
    shift
    [ "$(id -u)" = 0 ] || cannot "it needs root"
    export ROOT=$root USER_ID=$user
    # a mount, a process and an IPC namespace; the network is the machine's, so that its port is reached
    exec unshare --mount --pid --ipc --uts --fork --kill-child bash -euc '
        mount --make-rprivate /
        mount --bind "$ROOT" "$ROOT"
        mount -t proc proc "$ROOT/proc"
        mount -t tmpfs -o mode=1777 tmpfs "$ROOT/tmp"
        mount -t tmpfs -o uid=$USER_ID,gid=$USER_ID,mode=700 tmpfs "$ROOT/var/lib/lamina"
        mount -t tmpfs -o mode=755 tmpfs "$ROOT/dev"
        for name in null zero random urandom; do : >"$ROOT/dev/$name"; mount --bind "/dev/$name" "$ROOT/dev/$name"; done
        mkdir "$ROOT/dev/shm"; mount -t tmpfs -o mode=1777 tmpfs "$ROOT/dev/shm"
        mount -o remount,bind,ro "$ROOT"
        cd "$ROOT/app"
        exec env -i PATH=/opt/lamina/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/var/lib/lamina PYTHONDONTWRITEBYTECODE=1 LANG=C.UTF-8 \
            ${LAMINA_TOKEN:+LAMINA_TOKEN="$LAMINA_TOKEN"} \
            chroot "$ROOT" setpriv --reuid $USER_ID --regid $USER_ID --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all \
            sh -c "cd /app && exec lamina \"\$@\"" lamina "$@"
    ' bash "$@"
}

command=${1:-}
[ $# -ge 2 ] || { echo "clean_root.sh build ROOT [APP] | run ROOT ARGUMENT..." >&2; exit 2; }
shift
case $command in
build) build "$@" ;;
run) run "$@" ;;
*) echo "clean_root.sh build ROOT [APP] | run ROOT ARGUMENT..." >&2; exit 2 ;;
esac
