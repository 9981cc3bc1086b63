#!/bin/sh
# Builds the container image where no registry can be reached: the base is made from Debian's packages, the rest is
# deploy/Containerfile as it is. Needs buildah and debootstrap, and root. Run it in the repository's root.
#
#   deploy/image.sh [TAG [OPTIONS OF "buildah build"]]
#
# MIRROR names another mirror of Debian, SUITE another release.
set -eu

tag=${1:-segue}
[ $# -eq 0 ] || shift
suite=${SUITE:-bookworm}
base=localhost/segue-base:$suite

if ! buildah inspect --type image "$base" >/dev/null 2>&1; then
    root=$(mktemp -d)
    trap 'rm -rf "$root"' EXIT
    debootstrap --variant=minbase --include=python3-venv,ca-certificates "$suite" "$root/system" ${MIRROR:+"$MIRROR"}
    # What an image does not need: package lists, manuals and translations.
    chroot "$root/system" apt-get clean
    rm -rf "$root/system/var/lib/apt/lists/"* "$root/system/usr/share/doc/"* "$root/system/usr/share/man/"* \
        "$root/system/usr/share/locale/"* "$root/system/var/cache/"* "$root/system/var/log/"*
    ln -s python3 "$root/system/usr/bin/python"
    container=$(buildah from scratch)
    buildah add -q "$container" "$root/system" / >/dev/null
    buildah config --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$container"
    buildah commit -q --rm "$container" "$base" >/dev/null
fi

exec buildah build --format docker --pull=never --build-arg "BASE=$base" -f deploy/Containerfile -t "$tag" "$@" .
