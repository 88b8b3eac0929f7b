#!/bin/bash
# Make an authority, certificates of scheduler, workers and clients, and a configuration of Dask
# that refuses whatever is not encrypted.
#
#     ./make_certificates.sh FOLDER [NAME...]
#
# NAMES are those of further clients. Who holds a certificate of the authority can run code on the
# cluster; its key, authority.key, signs further ones and is needed for nothing else.
set -euo pipefail
umask 077
[ $# -ge 1 ] || { echo "usage: make_certificates.sh FOLDER [NAME...]" >&2; exit 2; }
command -v openssl >/dev/null || { echo "openssl is missing" >&2; exit 3; }
mkdir -p "$1"
cd "$1"
shift
days=${DAYS:-365}

new_key() { openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1" 2>/dev/null; }

if [ ! -e authority.key ]; then
    new_key authority.key
    openssl req -x509 -new -key authority.key -sha256 -days "$days" -subj "/CN=cme-dask authority" \
        -addext "basicConstraints=critical,CA:TRUE" -addext "keyUsage=critical,keyCertSign" \
        -out authority.pem
fi
for name in scheduler worker client "$@"; do
    [[ $name =~ ^[A-Za-z0-9._-]+$ ]] || { echo "not a name: $name" >&2; exit 2; }
    [ ! -e "$name.pem" ] || continue  # a second call adds names and keeps the others
    new_key "$name.key"
    openssl req -new -key "$name.key" -subj "/CN=$name" |
        openssl x509 -req -CA authority.pem -CAkey authority.key -sha256 -days "$days" \
            -set_serial "0x$(openssl rand -hex 16)" -out "$name.pem" 2>/dev/null \
            -extfile <(printf 'extendedKeyUsage=serverAuth,clientAuth\nsubjectAltName=DNS:%s' "$name")
done

cat >tls.yaml <<END
distributed:
  comm:
    default-scheme: tls
    require-encryption: true
    tls:
      ca-file: $PWD/authority.pem
      scheduler: {cert: $PWD/scheduler.pem, key: $PWD/scheduler.key}
      worker: {cert: $PWD/worker.pem, key: $PWD/worker.key}
      client: {cert: $PWD/client.pem, key: $PWD/client.key}
END
echo "$PWD/tls.yaml: set DASK_CONFIG to this file for scheduler, workers and clients"
