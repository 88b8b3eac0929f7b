#!/bin/bash
# Make an authority, certificates of scheduler, workers and clients, and a configuration of Dask
# that refuses whatever is not encrypted.
#
#     ./make_certificates.sh FOLDER [NAME...]
#
# NAMES are those of further clients. Who holds a certificate of the authority can run code on the
# cluster; its key, authority.key, signs further ones and is needed for nothing else. A second call
# adds names, replaces what has expired, and leaves all other certificates as they are.
set -euo pipefail
umask 077
[ $# -ge 1 ] || { echo "usage: make_certificates.sh FOLDER [NAME...]" >&2; exit 2; }
command -v openssl >/dev/null || { echo "openssl is missing" >&2; exit 3; }
days=${DAYS:-365}
[[ $days =~ ^[1-9][0-9]*$ ]] || { echo "DAYS must be a number of at least 1: $days" >&2; exit 2; }
mkdir -p "$1"
cd "$1"
shift

new_key() { openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1"; }
authority_lasts() { openssl x509 -in authority.pem -noout -checkend $(($1 * 86400)) >/dev/null; }

# The authority gets a day more, so that certificates made after it can end before it.
if [ ! -s authority.pem ] || ! authority_lasts 1; then
    new_key authority.key
    openssl req -x509 -new -key authority.key -sha256 -days $((days + 1)) \
        -subj "/CN=cme-dask authority" \
        -addext "basicConstraints=critical,CA:TRUE" -addext "keyUsage=critical,keyCertSign" \
        -out authority.pem
fi
if ! authority_lasts "$days"; then  # bisect how long it does
    least=0
    while [ $((days - least)) -gt 1 ]; do
        half=$(((days + least) / 2))
        if authority_lasts "$half"; then least=$half; else days=$half; fi
    done
    days=$least
fi
for name in scheduler worker client "$@"; do
    [[ $name =~ ^[A-Za-z0-9._-]+$ ]] || { echo "not a name: $name" >&2; exit 2; }
    if [ -s "$name.pem" ] && openssl verify -CAfile authority.pem "$name.pem" >/dev/null; then
        continue  # it is one of this authority, and has not expired
    fi
    new_key "$name.key"
    openssl req -new -key "$name.key" -subj "/CN=$name" |
        openssl x509 -req -CA authority.pem -CAkey authority.key -sha256 -days "$days" \
            -set_serial "0x$(openssl rand -hex 16)" -out "$name.pem" \
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
