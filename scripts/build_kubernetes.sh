#!/bin/sh
# Builds a Kubernetes control plane from Debian's sources, for the tests that install the chart on a real API server:
#
#     scripts/build_kubernetes.sh FOLDER            # seven minutes on two cores, 4 GB of disk; as root on Debian 12
#     LAMINA_KUBERNETES=FOLDER/bin pytest tests/deploy/test_api_server.py
#
# Debian 12 is the last release whose source package is the whole of Kubernetes (1.20.2); later ones are kubectl alone. No registry
# has a kube-apiserver as a binary. kubemark makes nodes: a real kubelet whose containers are pretended.
set -eu

folder=$(realpath -m "${1:?usage: scripts/build_kubernetes.sh FOLDER}")
version=1.20.2
source=$folder/go/src/k8s.io/kubernetes
mkdir -p "$folder/bin" "$(dirname "$source")"
cd "$folder"

cat > sources.list <<END
deb http://deb.debian.org/debian bookworm main
deb-src http://deb.debian.org/debian bookworm main
END
mkdir -p lists/partial
apt="apt-get -o Dir::Etc::SourceList=$folder/sources.list -o Dir::Etc::SourceParts=- -o Dir::State::Lists=$folder/lists -q"
$apt update
DEBIAN_FRONTEND=noninteractive $apt install -y --no-install-recommends etcd-server golang-1.19-go dpkg-dev openssl
if [ ! -d "$source" ]; then
    $apt source --download-only kubernetes
    dpkg-source --no-check -x kubernetes_*.dsc unpacked
    mv unpacked "$source"
    # The vendored reflect2 is older than Go 1.18 and corrupts memory with it; Debian has a later one.
    $apt download golang-github-modern-go-reflect2-dev
    dpkg-deb -x golang-github-modern-go-reflect2-dev_*.deb reflect2
    rm -rf "$source/vendor/github.com/modern-go/reflect2"
    cp -r reflect2/usr/share/gocode/src/github.com/modern-go/reflect2 "$source/vendor/github.com/modern-go/reflect2"
fi

export GOPATH="$folder/go" GOCACHE="$folder/cache" GO111MODULE=off CGO_ENABLED=0 PATH="/usr/lib/go-1.19/bin:$PATH"
cd "$source"
module=k8s.io/kubernetes
if [ ! -f pkg/generated/openapi/zz_generated.openapi.go ]; then
    go build -o "$folder/bin/openapi-gen" $module/vendor/k8s.io/kube-openapi/cmd/openapi-gen
    packages=$(grep -rl --include='*.go' -e '// +k8s:openapi-gen=' pkg cmd staging/src/k8s.io plugin |
        grep -v -e /testdata/ -e code-generator -e sample-apiserver -e generated/openapi | xargs -n1 dirname | sort -u |
        sed -e "s,^staging/src/,$module/vendor/,;t" -e "s,^,$module/," | paste -sd,)
    "$folder/bin/openapi-gen" -O zz_generated.openapi -i "$packages" -p $module/pkg/generated/openapi \
        -h hack/boilerplate/boilerplate.generatego.txt -r "$folder/violations"
fi
flags="-s -w"
for package in $module/vendor/k8s.io/component-base/version $module/vendor/k8s.io/client-go/pkg/version; do
    flags="$flags -X $package.gitVersion=v$version -X $package.gitMajor=1 -X $package.gitMinor=20 -X $package.gitTreeState=clean"
done
for command in kube-apiserver kube-controller-manager kube-scheduler kubemark; do
    go build -ldflags "$flags" -o "$folder/bin/$command" $module/cmd/$command
    echo "built $folder/bin/$command"
done
