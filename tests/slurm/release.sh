#!/usr/bin/env bash
# Another release of Slurm than the installed one, for tests: release.sh RELEASE
#
# Prints the folder of its programs, made of Debian's packages on first use, or nothing if it is the
# installed one. A release is a folder with bin/, lib/ and plugins/ in ~/.cache/slurm-cookbook. Its
# programs are patched to use the dynamic linker and the libraries of that folder. So they need no
# chroot, no root and no LD_LIBRARY_PATH, which the host's programs in job steps would inherit.
set -Eeuo pipefail

declare -rA DEBIAN_OF=([22.05]=bookworm [24.11]=trixie [26.05]=sid)
readonly PACKAGES=(slurm-wlm slurmdbd slurm-wlm-mysql-plugin munge patchelf)
readonly KEYRING=/usr/share/keyrings/debian-archive-keyring.gpg

say() { printf 'release.sh: %s\n' "$*" >&3; }

# apt-get with folders of its own: it neither needs root nor changes the host's packages, and the
# host's configuration, such as a proxy, still counts.
download_packages() { # part
    local mirror suite=${DEBIAN_OF[$release]} apt=$1/apt
    # shellcheck disable=SC2016 # these are apt-get's variables
    mirror=$(apt-get indextargets --format '$(ORIGIN) $(LABEL) $(REPO_URI)' 'Created-By: Packages' |
        sed -n 's/^Debian Debian //p' | head -n 1)
    mirror=${mirror:-http://deb.debian.org/debian/}
    mkdir -p -- "$apt"/{lists,archives}/partial
    : >"$apt/status"
    echo "deb [signed-by=$KEYRING] $mirror $suite main" >"$apt/sources.list"
    local own=(
        -o "Dir::Etc::SourceList=$apt/sources.list" -o Dir::Etc::SourceParts=/dev/null
        -o Dir::Etc::Preferences=/dev/null -o Dir::Etc::PreferencesParts=/dev/null
        -o "Dir::State=$apt" -o "Dir::State::Lists=$apt/lists" -o "Dir::State::Status=$apt/status"
        -o "Dir::Cache=$apt" -o "Dir::Cache::Archives=$apt/archives" -o "Dir::Log=$apt"
        -o APT::Default-Release= -o APT::Sandbox::User= -o APT::Install-Recommends=false
        -o APT::Update::Error-Mode=any -o Acquire::Languages=none -o Acquire::Retries=2
        -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20
    )
    apt-get "${own[@]}" update
    say "Slurm $release is downloaded once from Debian $suite, $mirror"
    apt-get "${own[@]}" -qq --yes --download-only install "${PACKAGES[@]}"
}

unpack_packages() { # part
    local package file linker
    for package in "$1"/apt/archives/*.deb; do
        file=others
        [[ ${package##*/} != @(slurm|munge)* ]] || file=slurm
        dpkg-deb -x "$package" "$1/$file"
    done
    mkdir -- "$1"/{bin,lib}
    mv -- "$1"/slurm/usr/bin/* "$1"/slurm/usr/sbin/* "$1/bin"
    # Debian's alternatives would make these links.
    for file in "$1"/bin/*-wlm; do mv -- "$file" "${file%-wlm}"; done
    mv -- "$1"/slurm/usr/lib/*/slurm-wlm "$1/plugins"
    for file in "$1"/{slurm,others}{/usr,}/lib/*-linux-gnu*/*.so*; do
        [[ ! -e $file && ! -L $file ]] || mv -f -- "$file" "$1/lib"
    done
    linker=$(compgen -G "$1/lib/ld-linux*.so.*" | head -n 1)
    # Debian's suite may have another release by now.
    "$linker" --library-path "$1/lib:$1/plugins" "$1/bin/slurmctld" -V | grep -F " $release."
    local patchelf=("$linker" --library-path "$1/lib" "$1/others/usr/bin/patchelf")
    # The libraries' own paths name the host's folders.
    "${patchelf[@]}" --remove-rpath "$1"/plugins/*.so
    for file in "$1"/bin/*; do
        [[ ! -L $file && $(head -c 4 -- "$file") == $'\x7fELF' ]] || continue
        # RPATH, not RUNPATH, because it counts for the libraries of libraries and plugins, too.
        "${patchelf[@]}" --set-interpreter "${release_bin%/*}/lib/${linker##*/}" --force-rpath \
            --set-rpath "\$ORIGIN/../lib:\$ORIGIN/../plugins" "$file"
    done
}

exec 3>&2
release=$1
[[ -v DEBIAN_OF[$release] ]] || { say "no release $release: ${!DEBIAN_OF[*]}" && exit 1; }
[[ $(PATH=$PATH:/usr/sbin:/sbin slurmctld -V 2>/dev/null) != *" $release."* ]] || exit 0
cache=${XDG_CACHE_HOME:-$HOME/.cache}/slurm-cookbook
release_bin=$cache/slurm-$release/bin part=$cache/slurm-$release.part log=$cache/slurm-$release.log
mkdir -p -- "$cache"
exec 8>"$cache/.lock"
flock 8
if [[ ! -d $release_bin ]]; then
    trap 'say "cannot make Slurm $release of the packages of Debian ${DEBIAN_OF[$release]}: see $log"' ERR
    # What an interrupted one left.
    rm -rf -- "$part"
    mkdir -- "$part"
    download_packages "$part" >"$log" 2>&1 </dev/null
    unpack_packages "$part" >>"$log" 2>&1 </dev/null
    rm -rf -- "$part/apt" "$part/slurm" "$part/others" "$log"
    mv -T -- "$part" "${release_bin%/*}"
fi
echo "$release_bin"
